"""What the network, the proofs and the verification cost: RL steps per minute of the demo against a bare loop.

    python -m benchmarks.overhead --json [--steps 150] [--repeat 5] [--timeline docs/benchmarks.md]

The demo is `trainer demo` as anyone runs it, without dishonest nodes, and all its processes share this machine's cores.
The bare loop is the same learning in one process: same base, same SFT, same tasks, same sampler, same update; no files,
no network, no proofs, no verification, no staleness. It runs with one thread and with all cores, and the faster one
counts. Both are timed the same way: from the end of SFT to the last step, so joining is in the demo's time.

Each demo is measured between two bare loops and compared with their mean, and the median of the ratios counts: what
else a shared machine does changes its pace by up to a half within minutes.

`--timeline` also writes where the demo's steps go (`benchmarks.timeline`) into that document, between its marks.

Not covered: real models, more than one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import timeline
from benchmarks.contract import CouldNotRunError, Goal, at_least, machine, run

TARGET = 0.6
DEMO_DEADLINE_S = 1200.0
WARM_STEPS = 10


@dataclass(frozen=True)
class Bare:
    """The bare loop's pace and the milliseconds of its two parts, a step."""

    steps_per_minute: float
    sample_ms: float
    learn_ms: float


@dataclass(frozen=True)
class Pair:
    """A demo, and the bare loop right before and right after it."""

    demo: float
    before: Bare
    after: Bare
    watch: timeline.Watch
    way: dict[str, float]

    @property
    def bare(self) -> float:
        return (self.before.steps_per_minute + self.after.steps_per_minute) / 2

    @property
    def ratio(self) -> float:
        return self.demo / self.bare


def measure(args: argparse.Namespace) -> list[Goal]:
    pairs = sorted(measure_pairs(args.steps, args.repeat), key=lambda pair: pair.ratio)
    middle = pairs[len(pairs) // 2]
    if middle.watch.last is not None:
        head = (
            f"{time.strftime('%Y-%m-%d')}, {args.steps} steps, {machine()}: demo {middle.demo:.0f} steps a minute, "
            f"bare loop {middle.bare:.0f}, ratio **{middle.ratio:.2f}** (the median of "
            f"{', '.join(f'{pair.ratio:.2f}' for pair in pairs)})."
        )
        parts = {"sampling": middle.after.sample_ms, "learning": middle.after.learn_ms}
        text = timeline.as_markdown(middle.watch, middle.way, parts, head)
        sys.stderr.write(text + "\n")
        if args.timeline is not None:
            timeline.replace_between_marks(args.timeline, text)
    goal = (
        "RL steps per minute of the demo / of the same learning in one process "
        "(samples: demo and mean of the bare loops around it, by ratio)"
    )
    paces = [pace for pair in pairs for pace in (pair.demo, pair.bare)]
    return [at_least(goal, TARGET, middle.ratio, paces)]


def measure_pairs(steps: int, repeat: int) -> list[Pair]:
    with tempfile.TemporaryDirectory(prefix="headwater-overhead-") as scratch:
        files = Path(scratch) / "first"
        demo_steps_per_minute(WARM_STEPS, files)  # the run whose files the bare loops use; caches are warm after it
        before, pairs = best_bare(files, steps), []
        for number in range(repeat):
            run_dir = Path(scratch) / f"run-{number}"
            watch = timeline.Watch(run_dir).start()
            try:
                demo = demo_steps_per_minute(steps, run_dir)
            finally:
                watch.stop()
            after = best_bare(files, steps)
            pairs.append(Pair(demo, before, after, watch, timeline.way_of_a_batch(run_dir)))
            sys.stderr.write(f"demo {demo:.1f} steps a minute, ratio {pairs[-1].ratio:.3f}\n")
            before = after
        return pairs


def best_bare(run_dir: Path, steps: int) -> Bare:
    """The faster of one thread and all cores."""
    bare = [bare_loop(run_dir, steps, threads) for threads in (1, len(os.sched_getaffinity(0)))]
    paces = [loop.steps_per_minute for loop in bare]
    sys.stderr.write("bare loop {:.1f} (1 thread) and {:.1f} (all cores) steps a minute\n".format(*paces))
    return max(bare, key=lambda loop: loop.steps_per_minute)


def demo_steps_per_minute(steps: int, run_dir: Path) -> float:
    """Run the demo and read its pace from what the learner wrote.

    Raises:
        CouldNotRunError: the demo failed, ran into the deadline, or did not make its steps.
    """
    command = [sys.executable, "-m", "trainer.cli", "demo", "--steps", str(steps), "--dir", str(run_dir), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=DEMO_DEADLINE_S)
    except subprocess.TimeoutExpired as exc:
        raise CouldNotRunError(f"the demo made no {steps} steps within {DEMO_DEADLINE_S:.0f} s") from exc
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=30)
    if process.returncode != 0:
        raise CouldNotRunError(f"`{' '.join(command)}` ended with exit code {process.returncode}; try it by hand")
    summary = json.loads(output)
    if summary["steps"] < steps:
        raise CouldNotRunError(f"the demo made {summary['steps']} of {steps} steps; look at its summary: {summary}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    begun = next(row["time"] for row in rows if row["event"] == "sft" and row["done"])
    last = max(row["time"] for row in rows if row["event"] == "step")
    return 60.0 * steps / (float(last) - float(begun))


def bare_loop(run_dir: Path, steps: int, threads: int) -> Bare:
    """The same learning in this process, from the run's own files."""
    import torch

    from protocol.heap import settle_heap
    from protocol.manifest import open_manifest
    from shardcast.layout import layout_of_safetensors
    from trainer import config, sft
    from trainer.learner import DTYPES
    from trainer.update import Policy
    from verifier.allocator import keep_freed_memory
    from verifier.model import load_policy

    keep_freed_memory()
    torch.set_num_threads(threads)
    settings = config.load(run_dir)
    opened = open_manifest((run_dir / "manifest.hw").read_bytes())
    base = load_policy(run_dir / "model")
    for parameter in base.model.parameters():
        parameter.requires_grad_(True)
    layout = layout_of_safetensors(run_dir / "model" / "model.safetensors")
    storage = {spec.name: DTYPES[spec.dtype] for spec in layout.tensors}
    policy = Policy(base.model, settings.learner, storage, opened.manifest.sampling.temperature)
    sft.stage_one(
        base, settings.sft, opened.manifest, seed=settings.learner.seed, record=lambda *_: None, stop=lambda: False
    )
    settle_heap()
    sampling_s = 0.0
    begun = time.monotonic()
    for step in range(steps):
        started = time.monotonic()
        batch = sample(opened, base, step)
        sampling_s += time.monotonic() - started
        policy.learn(batch)
    seconds = time.monotonic() - begun
    return Bare(60.0 * steps / seconds, 1e3 * sampling_s / steps, 1e3 * (seconds - sampling_s) / steps)


def sample(opened: Any, base: Any, step: int) -> Any:
    """One batch, sampled by the policy itself: no lease, no proof, no check, no file."""
    from environments import registry
    from node.decode import DecodeRequest, decode
    from protocol.seeds import group_id, sampling_seed
    from trainer.incoming import Sequence as Rollout
    from trainer.incoming import TrainingBatch
    from verifier.model import completion_text, prompt_ids

    manifest = opened.manifest
    leases, sampling = manifest.leases, manifest.sampling
    environment = registry.load(manifest.environments[step % len(manifest.environments)])
    nonce = bytes(32)
    tasks = [environment.task(step * leases.tasks_per_step + i) for i in range(leases.tasks_per_step)]
    pairs = [(task, i) for task in tasks for i in range(leases.samples_per_task)]
    prompts = {task.index: tuple(prompt_ids(base.tokenizer, task.prompt)) for task in tasks}
    requests = [
        DecodeRequest(prompts[t.index], sampling_seed(opened.id, nonce, t.index, i), sampling.max_new_tokens)
        for t, i in pairs
    ]
    base.model.eval()
    done = decode(base.model, requests, temperature=sampling.temperature, stop_tokens=sampling.stop_tokens)
    rollouts = []
    for (task, _), out in zip(pairs, done, strict=True):
        text = completion_text(base.tokenizer, out.tokens, sampling.stop_tokens)
        reward = environment.score(task, text, out.tokens[-1] in sampling.stop_tokens)
        group = group_id(nonce, task.index)
        rollouts.append(Rollout(group, prompts[task.index], out.tokens, out.logprobs, reward, 0))
    return TrainingBatch(step, tuple(rollouts), frozenset())


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=150, help="RL steps of each side (default: 150, as the demo)")
    parser.add_argument("--repeat", type=int, default=5, help="demos, each between two bare loops (default: 5)")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="write the tables of one step into this document")


def main() -> int:
    return run(measure, "RL steps per minute of the demo against one process without network or checks.", arguments)


if __name__ == "__main__":
    sys.exit(main())
