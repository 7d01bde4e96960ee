"""The learner: `trainer learn RUN/run.toml`. Waits for a batch, takes one step, hands over the weights, again.

It reads `batches/` and nothing else that others produce, and writes `checkpoints/` and `metrics.jsonl`. Coordinator
and learner meet only in these files; each can die at any moment and come back alone.

    start   the newest whole checkpoint with the optimiser's state, if there is one; else stage one (SFT) on the base
    resume  batches since that checkpoint are trained again: on one thread the same bits come out. Checkpoints that
            are already there are compared, never rewritten: they may be published.
    stop    SIGTERM or Ctrl-C: after the step in hand, at the latest after 1.5 s. Every file is whole or absent, so
            nothing is lost either way.

Not covered: more than one rank; rollbacks (a new epoch); sampling and verification (`node`, `verifier`).
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from protocol.commands import several
from protocol.errors import ReasonCode, UsageError
from protocol.heap import settle_heap
from protocol.manifest import Run, open_manifest
from shardcast.layout import layout_of_safetensors, require_layout
from trainer import checkpoints, finished, sft
from trainer.checkpoints import Checkpoint
from trainer.config import RunConfig
from trainer.errors import TrainerError
from trainer.incoming import Door, batch_path, read_batch
from trainer.metrics import MetricsFile
from trainer.update import Policy
from verifier.allocator import keep_freed_memory
from verifier.model import PolicyModel, load_policy
from verifier.progress import Tell, bar

EPOCH = 0
"""Opens with the run; only a rollback would open another."""

POLL_S = 0.01
TELL_EVERY_S = 30.0
BATCH_DEADLINE_S = 24 * 3600.0
"""A run that makes no batch for a day is not running. The learner ends with an error; starting it again is safe."""

STOP_GRACE_S = 1.5
DTYPES = {name: dtype for dtype, name in checkpoints.DTYPE_NAMES.items()}

Say = Callable[[str], None]


@dataclass
class Learner:
    """What the loop carries from step to step."""

    config: RunConfig
    run: Run
    policy: Policy
    base: PolicyModel
    door: Door
    metrics: MetricsFile
    stopping: threading.Event
    say: Say
    written: list[Checkpoint] = field(default_factory=list)
    trained: deque[frozenset[tuple[int, int]]] = field(default_factory=deque)
    adopted: int = 0
    quiet: bool = True
    """Draw no progress bars."""

    @property
    def root(self) -> Path:
        return self.config.run_dir / "checkpoints"


def learn(
    config: RunConfig, stopping: threading.Event, say: Say, *, only_sft: bool = False, quiet: bool = True
) -> dict[str, Any]:
    """Train the run to its last step, or until `stopping` is set.

    Returns:
        A summary: steps done, step resumed from (None for a new run), checkpoints adopted on replay.

    Raises:
        UsageError: the run directory is no run, or another learner works on it.
        BatchError, CheckpointError, TrainerError: see their messages; the state on disk stays whole.
    """
    with sole_learner(config.run_dir):
        learner = prepare(config, stopping, say)
        learner.quiet = quiet
        resumed = resume(learner)
        if resumed is None:
            begin(learner)
        if not only_sft:
            with bar("learning", "steps", quiet=quiet) as tell:
                train(learner, tell)
        return {"steps": learner.policy.step, "resumed_from": resumed, "checkpoints_adopted": learner.adopted}


def train(learner: Learner, tell: Tell) -> None:
    """Batch after batch, until the run's last step or until somebody stops it."""
    last, mark = learner.run.manifest.steps, time.monotonic()
    while learner.policy.step < last:
        step = learner.policy.step
        path = batch_path(learner.config.run_dir, step)
        idle_s = await_batch(path, learner.stopping, learner.say)
        if learner.stopping.is_set():
            return
        batch = read_batch(path, step, learner.door, learner.trained)
        row = learner.policy.learn(batch)
        learner.trained.append(batch.identities)
        now = time.monotonic()
        row |= {"seconds": now - mark, "idle_seconds": idle_s, "idle_share": idle_s / max(now - mark, 1e-9)}
        mark = now
        learner.metrics.append("step", step, row)
        hand_over(learner)
        tell(learner.policy.step, last, f"reward {row['reward_mean']:.2f}")


def prepare(config: RunConfig, stopping: threading.Event, say: Say) -> Learner:
    """Load the run's manifest and base model, and open the files to write."""
    keep_freed_memory()
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.learner.seed)
    run = read_run(config.run_dir)
    directory = config.run_dir / "model"
    layout = layout_of_safetensors(directory / "model.safetensors")
    require_layout(layout, run.manifest.model.layout, f"{directory}/model.safetensors")
    base = load_policy(directory, torch.float32)
    for parameter in base.model.parameters():
        parameter.requires_grad_(True)
    storage = {spec.name: DTYPES[spec.dtype] for spec in layout.tensors}
    policy = Policy(base.model, config.learner, storage, run.manifest.sampling.temperature)
    door = Door.of(run, base.vocabulary, EPOCH)
    metrics = MetricsFile(config.run_dir / "metrics.jsonl")
    trained: deque[frozenset[tuple[int, int]]] = deque(maxlen=max(1, door.max_staleness))
    return Learner(config, run, policy, base, door, metrics, stopping, say, trained=trained)


def resume(learner: Learner) -> int | None:
    """Go back to the newest checkpoint that can be trained on from; None when the run has none yet."""
    learner.written = checkpoints.find_checkpoints(learner.root, learner.say)
    checkpoint = checkpoints.newest_resumable(learner.written, learner.say)
    if checkpoint is None:
        return None
    weights = checkpoints.load_tensors(checkpoint, checkpoints.WEIGHTS)
    optimizer = checkpoints.load_tensors(checkpoint, checkpoints.OPTIMIZER)
    learner.policy.restore(weights, optimizer, checkpoint.step)
    for step in range(max(0, checkpoint.step - learner.door.max_staleness), checkpoint.step):
        learner.trained.append(read_batch(batch_path(learner.config.run_dir, step), step, learner.door).identities)
    newest = learner.written[-1].step
    learner.say(f"resuming from {checkpoint.directory.name}; the newest checkpoint is of step {newest}")
    learner.metrics.append("resume", checkpoint.step, {"newest": newest}, again=True)
    return checkpoint.step


def begin(learner: Learner) -> None:
    """Stage one: supervised fine-tuning of the base, then the checkpoint of step 0."""
    config = learner.config.sft
    if config.steps:
        learner.say(f"stage one, SFT: {config.steps} steps of {config.batch_size} examples")
        with bar("stage one", "steps", quiet=learner.quiet) as tell:

            def record(step: int, fields: dict[str, Any]) -> None:
                learner.metrics.append("sft", step, fields)
                tell(step, config.steps, f"loss {fields['loss']:.3f}")

            sft.stage_one(
                learner.base,
                config,
                learner.run.manifest,
                seed=learner.config.learner.seed,
                record=record,
                stop=learner.stopping.is_set,
            )
    if not learner.stopping.is_set():
        write(learner, resumable=True)


def hand_over(learner: Learner) -> None:
    """Write the new policy's checkpoint, or compare it with the one that is already there."""
    step = learner.policy.step
    there = next((c for c in learner.written if c.step == step), None)
    if there is not None:
        adopt(learner, there)
    elif not learner.written or step > learner.written[-1].step:
        every = learner.config.learner.checkpoint_every
        write(learner, resumable=step % every == 0 or step == learner.run.manifest.steps)


def write(learner: Learner, *, resumable: bool) -> None:
    policy = learner.policy
    state = {"step": policy.step, "torch": torch.__version__, "threads": learner.config.learner.threads}
    checkpoint = checkpoints.write_checkpoint(
        learner.root,
        epoch=EPOCH,
        step=policy.step,
        weights=policy.weights(),
        optimizer=policy.optimizer_tensors() if resumable else None,
        state=state if resumable else None,
    )
    learner.written = checkpoints.prune([*learner.written, checkpoint], learner.config.learner.keep_checkpoints)


def adopt(learner: Learner, there: Checkpoint) -> None:
    """A replayed step must give what nodes already sample from; where it does not, theirs counts, and it is said."""
    published = checkpoints.load_tensors(there, checkpoints.WEIGHTS)
    own = learner.policy.weights()
    if all(torch.equal(own[name], tensor) for name, tensor in published.items()):
        return
    if not learner.adopted:
        learner.say(
            f"replaying step {there.step} gave other low bits than {there.directory} (another machine, thread count or "
            "torch); taking the published weights over, which the nodes sample from"
        )
    learner.adopted += 1
    learner.policy.adopt(published)


def await_batch(path: Path, stopping: threading.Event, say: Say, deadline_s: float = BATCH_DEADLINE_S) -> float:
    """Wait until the batch file is there or a stop is asked for; returns the seconds waited.

    Raises:
        TrainerError: `deadline`, no batch came in time.
    """
    started = time.monotonic()
    tell = started + TELL_EVERY_S
    while not path.exists() and not stopping.wait(POLL_S):
        now = time.monotonic()
        if now > tell:
            tell = now + TELL_EVERY_S
            say(
                f"waiting for {path.parent.name}/{path.name} for {now - started:.0f} s: the coordinator writes it when "
                "enough rollouts were accepted (is `trainer serve` running, have nodes and a validator joined?)"
            )
        if now - started > deadline_s:
            raise TrainerError(
                f"no {path} within {deadline_s:.0f} s; the operator must start `trainer serve` and nodes, then "
                "`trainer learn` again",
                ReasonCode.DEADLINE,
            )
    return time.monotonic() - started


def read_run(run_dir: Path) -> Run:
    """The run this directory belongs to. Raises UsageError or ManifestError."""
    path = run_dir / "manifest.hw"
    try:
        return open_manifest(path.read_bytes())
    except OSError as exc:
        raise UsageError(f"{path} cannot be read ({exc.strerror}); make a run first: trainer init {run_dir}") from exc


@contextmanager
def sole_learner(run_dir: Path) -> Iterator[None]:
    """Hold the run's learner lock. Raises UsageError naming the process that has it."""
    root = run_dir / "checkpoints"
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".learner.lock").open("a+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            lock.seek(0)
            raise UsageError(
                f"another learner works on {run_dir} (process {lock.read(20).strip() or 'unknown'}); stop it first, or "
                "leave it alone"
            ) from exc
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def watch_signals() -> threading.Event:
    """Set the returned event on SIGTERM or SIGINT, and end the process `STOP_GRACE_S` later if it still runs.

    A thread is told by the interpreter's wakeup descriptor: a Python handler alone would only run after the tensor
    operation in hand. Call it from the main thread.
    """
    stopping = threading.Event()
    told, tell = socket.socketpair()
    tell.setblocking(False)
    signal.set_wakeup_fd(tell.detach())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)

    def watch() -> None:
        received = told.recv(1)[0]
        stopping.set()
        time.sleep(STOP_GRACE_S)
        os._exit(128 + received)

    threading.Thread(target=watch, name="signals", daemon=True).start()
    return stopping


def main(config: RunConfig, *, as_json: bool = False, only_sft: bool = False) -> int:
    """The command: exit 0 when done or stopped, else the error's code (see `trainer.cli`)."""
    settle_heap()
    stopping = watch_signals()

    def say(text: str) -> None:
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} learner: {text}\n")
        sys.stderr.flush()

    summary = learn(config, stopping, say, only_sft=only_sft, quiet=as_json)
    steps = config.run.steps
    if not only_sft and summary["resumed_from"] == steps and finished.is_known(config.run_dir):
        for sentence in finished.said(config.run_dir, steps, "learn"):
            say(sentence)
    elif stopping.is_set():
        say(f"stopped after step {summary['steps']}; the same command goes on from here")
    else:
        say(f"done: {several(summary['steps'], 'step')}")
    if as_json:
        sys.stdout.write(json.dumps(summary) + "\n")
    return 0
