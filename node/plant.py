"""`node plant`: works beside a run under the operator's phantoms, so that some jobs have a known answer (RULES 6).

    this process     reads the coordinator's secret and status.json, chooses who works, starts and ends
    a child each     an ordinary `node join --role inference` with an engine of its own, a home and a transport key of
                     its own; of the leases that the secret makes plants it alters the answer (`trainer.plants`)

It holds the coordinator's secret, so it runs where the coordinator runs, as the same user. Whoever sees addresses
(relays, the swarm) may see that phantoms join from there; validators see none. Each phantom's home is removed when its
time is over: keys come back from the secret, weights from the run.

Not covered: which key works when, and what is altered (`protocol.phantoms`, `trainer.plants`); several at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tokenizers

from node.home import Home
from node.inference import Work
from node.join import run_join
from node.log import EventLog
from node.options import JoinOptions, check_options
from protocol import draws, phantoms
from protocol.engine import GenerateOutput
from protocol.errors import HeadwaterError, UsageError
from protocol.identity import write_identity
from protocol.lifeline import die_with_parent
from protocol.phantoms import Phantom
from trainer import config, plants
from trainer.plants import Picture
from verifier.completion import completion_text

POLL_S = 2.0
"""How often the run is looked at. A phantom that went on for longer after its time would be given no lease."""

PAUSE_S = 90.0
"""Longest time until the next phantom joins."""

RETRY_S, RETRY_MAX_S = 5.0, 300.0
"""Pause after a phantom's process failed, doubled with each failure in a row."""

STOP_S = 10.0
MAX_STATUS_BYTES = 64 << 20


@dataclass(frozen=True)
class PlantOptions:
    """What was typed after `node plant`."""

    config: Path
    home: Path | None = None
    """Folder of the phantoms' homes; by default in the run's state directory."""
    engine_socket: Path | None = None
    threads: int = 1
    pause_s: float = PAUSE_S
    log: Path | None = None
    as_json: bool = False


def run_plant(options: PlantOptions) -> int:
    """Work as one phantom after another until the run is over or the operator ends it. Returns the exit code.

    Raises:
        UsageError: no run, no secret, or an option that can't hold.
    """
    run = config.load(options.config)
    own = plants.read_secret(run.state_dir)
    homes = options.home or run.state_dir / "plants"
    check_options(_join(options, run.run_dir, homes, ""))
    if not 0 <= options.pause_s < threading.TIMEOUT_MAX:
        raise UsageError(f"--pause {options.pause_s}: give a number of seconds")
    homes.mkdir(parents=True, exist_ok=True, mode=0o700)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    log = EventLog(as_json=options.as_json, file=options.log)
    try:
        return _Shift(options, run.run_dir, homes, own, log, stop).work()
    finally:
        log.close()


@dataclass
class _Shift:
    """One phantom after another."""

    options: PlantOptions
    run_dir: Path
    homes: Path
    own: bytes
    log: EventLog
    stop: threading.Event
    failures: int = 0

    def work(self) -> int:
        while not self.stop.is_set():
            picture = self._look()
            if picture is not None and picture.finished:
                self.log.event("left", reason="the run is finished")
                self.log.last_words("the run is finished")
                break
            phantom = plants.next_phantom(self.own, picture) if picture is not None else None
            if picture is None or phantom is None:
                self.stop.wait(POLL_S)
                continue
            self._tidy(phantom)
            joined = self._key(phantom) in picture.nodes
            pause_s = 0.0 if joined else plants.pause_s(self.own, phantom, self.options.pause_s)
            if not self.stop.wait(pause_s):
                self._be(phantom)
        return 0

    def _be(self, phantom: Phantom) -> None:
        """Run one phantom's node until its time is over, it ends, or this process is to end."""
        command = [sys.executable, "-P", "-m", "node.plant", str(self.options.config), str(self.homes)]
        command += [str(phantom.period), str(phantom.number), str(self.options.threads)]
        command += [str(self.options.engine_socket or ""), str(os.getpid())]
        self.log.event("phantom", period=phantom.period, number=phantom.number, key=self._key(phantom))
        path = self._home(phantom).with_suffix(".log")
        with path.open("ab") as output:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            while child.poll() is None and not self.stop.wait(POLL_S):
                picture = self._look()
                if picture is not None and phantoms.over(phantom.period, picture.period, picture.entered):
                    break
        finally:
            ended = child.poll()
            _end(child)
        self.log.event("phantom.left", period=phantom.period, number=phantom.number, status=ended)
        if ended:
            self.failures += 1
            pause_s = min(RETRY_MAX_S, RETRY_S * 2.0 ** (self.failures - 1))
            self.log.say(f"a phantom's node ended with status {ended}, see {path}; again in {pause_s:.0f} s")
            self.stop.wait(pause_s)
        else:
            self.failures = 0

    def _look(self) -> Picture | None:
        try:
            with (self.run_dir / "status.json").open("rb") as file:
                return Picture.read(file.read(MAX_STATUS_BYTES))
        except OSError:
            return None

    def _tidy(self, going: Phantom) -> None:
        """Homes and logs of others are of no use any more: each home holds policies."""
        for path in self.homes.iterdir():
            if path.stem == self._home(going).name:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix == ".log":
                path.unlink(missing_ok=True)

    def _home(self, phantom: Phantom) -> Path:
        return home_of(self.homes, phantom)

    def _key(self, phantom: Phantom) -> bytes:
        return phantoms.identity(draws.period_secret(self.own, phantom.period), phantom.number).public


def _end(child: subprocess.Popen[bytes]) -> None:
    """Let it hand back its lease; what does not end is killed."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it: nobody can do more
                child.wait(STOP_S)


def home_of(homes: Path, phantom: Phantom) -> Path:
    return homes / f"{phantom.period}-{phantom.number}"


def _join(options: PlantOptions, run_dir: Path, home: Path, name: str) -> JoinOptions:
    return JoinOptions(
        role="inference",
        run=str(run_dir / "join.hw"),
        home=home,
        name=name,
        engine_socket=options.engine_socket,
        threads=options.threads,
        yes=True,
        as_json=True,
    )


# --- one phantom ------------------------------------------------------------------------------------------------------


def join_options(options: PlantOptions, homes: Path, phantom: Phantom) -> JoinOptions:
    """How one phantom joins; its key is written into its home. Raises UsageError."""
    run = config.load(options.config)
    own = plants.read_secret(run.state_dir)
    secret = draws.period_secret(own, phantom.period)
    home = home_of(homes, phantom)
    write_identity(Home(home).path / "identity.pem", phantoms.identity(secret, phantom.number))
    ordinary = _join(options, run.run_dir, home, plants.name_of(own, phantom))
    return replace(ordinary, alter=altering(secret, phantom.number))


def altering(
    secret: bytes, number: int
) -> Callable[[Work, list[GenerateOutput], tokenizers.Tokenizer], list[GenerateOutput]]:
    """What a phantom makes of honest answers: the same but for plants. Rewards are computed afterwards, from the text.

    Args:
        secret: of the phantom's period.
    """

    def alter(work: Work, outputs: list[GenerateOutput], tokenizer: tokenizers.Tokenizer) -> list[GenerateOutput]:
        if not phantoms.is_plant(secret, number, work.lease.lease_id):
            return outputs
        manifest = work.run.manifest
        out = []
        for honest, made in zip(outputs, plants.spoil(secret, work.lease, outputs, manifest), strict=True):
            if made.tokens != honest.tokens:
                ids = np.frombuffer(made.tokens, "<u4").tolist()
                made = replace(made, text=completion_text(tokenizer, ids, manifest.sampling.stop_tokens))
            out.append(made)
        return out

    return alter


def main() -> int:
    """One phantom's process: config, homes, period, number, threads, engine socket or nothing, pid of the parent."""
    config_path, homes, period, number, threads, socket, parent = sys.argv[1:]
    die_with_parent(int(parent))
    options = PlantOptions(Path(config_path), engine_socket=Path(socket) if socket else None, threads=int(threads))
    try:
        return run_join(join_options(options, Path(homes), Phantom(int(period), int(number))))
    except HeadwaterError as exc:
        sys.stderr.write(f"{exc}\n")
        return 2 if isinstance(exc, UsageError) else 1


if __name__ == "__main__":
    sys.exit(main())
