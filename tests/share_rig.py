"""Folders of checkpoints as other programs write them, and the commands that move them, for tests of shares."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.shardcast_run import WAIT_S

Tensors = dict[str, np.ndarray[Any, Any]]


def tensors(seed: int, rows: int = 40, dtype: type = np.float32) -> Tensors:
    """Eight random tensors of `rows` x 64."""
    rng = np.random.default_rng(seed)
    return {f"layers.{n}.weight": rng.standard_normal((rows, 64)).astype(dtype) for n in range(8)}


def write(folder: Path, values: Tensors, parts: int = 1, config: str = '{"model_type": "qwen3"}', **more: str) -> None:
    """A checkpoint folder with configuration and tokenizer, weights in one file or in several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    for name, text in more.items():
        (folder / name).write_text(text)
    names = sorted(values)
    if parts == 1:
        save_file(values, folder / "model.safetensors", {"format": "pt"})
        return
    of = {name: f"model-{n % parts + 1:05d}-of-{parts:05d}.safetensors" for n, name in enumerate(names)}
    for file in sorted(set(of.values())):
        save_file({name: values[name] for name in names if of[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": of}))


def same(folder: Path, values: Tensors, name: str = "model.safetensors") -> bool:
    """Whether a folder loads to exactly these tensors, bit for bit."""
    loaded = load_file(folder / name)
    return loaded.keys() == values.keys() and all(
        loaded[n].dtype == values[n].dtype and loaded[n].tobytes() == values[n].tobytes() for n in values
    )


class Command:
    """`shardcast ARGS --json` as a process; its lines with a deadline."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shardcast.cli", *args, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def line(self, key: str = "") -> dict[str, Any]:
        """The next line, or the next that has a key."""
        while True:
            try:
                text = self._lines.get(timeout=WAIT_S)
            except Empty:
                raise AssertionError(f"nothing with {key!r} was printed within {WAIT_S} s") from None
            assert text, f"the process ended: {self.process.stderr.read() if self.process.stderr else ''}"
            table: dict[str, Any] = json.loads(text)
            if not key or key in table:
                return table

    def end(self) -> tuple[int, dict[str, Any], str]:
        """Exit code, last line and stderr of a command that ends by itself."""
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        last = ""
        while not self._lines.empty():
            last = self._lines.get() or last
        assert self.process.stderr is not None
        return code, json.loads(last) if last else {}, self.process.stderr.read()


@contextmanager
def command(*args: str) -> Iterator[Command]:
    """A command that does not outlive the test."""
    made = Command(*args)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait(WAIT_S)
        for stream in (made.process.stdout, made.process.stderr):
            if stream is not None:
                stream.close()


def pull(code: str, directory: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    """`shardcast pull CODE DIR --allow-private` to its end."""
    with command("pull", code, str(directory), "--allow-private", *more) as pulled:
        return pulled.end()
