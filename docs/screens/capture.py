"""Makes the screens of docs/terminal.md again: real demos on a real terminal (tmux), as text.

    python docs/screens/capture.py                    runs two demos (five to ten minutes) and writes every screen
    python docs/screens/capture.py --only caught      ... only these (comma-separated; see SHOTS)
    python docs/screens/capture.py --redraw           draws the stored pictures again, without running anything:
                                                      for a change of words or layout
    python docs/screens/capture.py --page             only copies the screens into docs/terminal.md (the others do too)

Each screen is three files: NAME.txt (what tmux shows), NAME.ansi (the same with colours: `cat` it), NAME.json (the
picture it was drawn from). tests/test_screens.py draws NAME.json again and compares with NAME.txt.

It needs tmux, and headwater installed in the Python that runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer import cli, view
from trainer.ending import summary_lines
from trainer.picture import Picture, Process, take_picture
from trainer.screen import screen
from trainer.spans import plain

HERE = Path(__file__).resolve().parent
SOCKET = "headwater-screens"
ROW_KEYS = ("event", "step", "reward_mean", "time")
EVENTS = 64
"""Events kept in a stored picture: as many as a coordinator remembers, since equal ones are counted."""


# --- pictures as files --------------------------------------------------------------------------------------------


def to_json(picture: Picture, width: int, height: int) -> dict[str, Any]:
    """Everything `screen` looks at."""
    kept = ("title", "seconds", "steps", "members", "began", "sft", "notes", "now", "learner_alive", "origin_alive",
            "sent", "run_dir", "staged")  # fmt: skip
    rows = [{key: row[key] for key in ROW_KEYS if key in row} for row in picture.rows]
    events = list(picture.status.get("recent_events", []))[-EVENTS:]
    return {
        "width": width, "height": height,
        **{name: getattr(picture, name) for name in kept},
        "notes": list(picture.notes[-EVENTS:]),
        "status": {**picture.status, **({"recent_events": events} if picture.status else {})},
        "rows": rows,
        "dishonest": sorted(picture.dishonest),
        "kinds": sorted(picture.kinds),
        "processes": {name: asdict(process) for name, process in picture.processes.items()},
    }  # fmt: skip


def from_json(stored: dict[str, Any]) -> tuple[Picture, int, int | None]:
    """A stored picture, and the size it was drawn at; no height where it scrolls (`trainer status`)."""
    fields = dict(stored)
    width, height = fields.pop("width"), fields.pop("height") or None
    fields |= {
        "dishonest": frozenset(fields["dishonest"]),
        "kinds": frozenset(fields["kinds"]),
        "notes": [tuple(note) for note in fields["notes"]],
        "processes": {name: Process(**process) for name, process in fields["processes"].items()},
    }
    return Picture(**fields), width, height


def drawn(stored: dict[str, Any]) -> list[str]:
    """What `trainer` draws of a stored picture, or prints at the end of a demo."""
    if "summary" in stored:
        return [plain(line) for line in summary_lines(stored["summary"], stored["run_dir"])]
    return [plain(line) for line in screen(*from_json(stored))]


# --- tmux ---------------------------------------------------------------------------------------------------------


def tmux(*words: str) -> str:
    command = ["tmux", "-u", "-L", SOCKET, "-f", os.devnull, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"tmux {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Session:
    """A shell in a terminal of a given size."""

    def __init__(self, folder: Path, width: int, height: int) -> None:
        size = ("-x", str(width), "-y", str(height))
        shell = ["env", f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}", "PS1=$ ", "sh"]
        tmux("new-session", "-d", *size, "-c", str(folder), shlex.join(shell))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        tmux("kill-server")
        time.sleep(1.0)  # its socket goes a moment later

    def resize(self, width: int, height: int) -> None:
        tmux("resize-window", "-x", str(width), "-y", str(height))

    def type(self, *keys: str) -> None:
        tmux("send-keys", *keys)

    def lines(self) -> list[str]:
        text = [line.rstrip() for line in tmux("capture-pane", "-p").splitlines()]
        while text and not text[-1]:
            text.pop()
        return text

    def save(self, name: str, stored: dict[str, Any]) -> None:
        """Write the three files of one screen."""
        (HERE / f"{name}.txt").write_text("\n".join(self.lines()) + "\n", encoding="utf-8")
        (HERE / f"{name}.ansi").write_text(tmux("capture-pane", "-p", "-e").rstrip() + "\n", encoding="utf-8")
        (HERE / f"{name}.json").write_text(json.dumps(stored, separators=(",", ":")) + "\n", encoding="utf-8")
        sys.stdout.write(f"{name}: {len(self.lines())} lines\n")


# --- shots --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shot:
    """One screen: its terminal, and when it is taken."""

    name: str
    width: int
    height: int
    when: Callable[[dict[str, Any]], bool]


def joined(stored: dict[str, Any]) -> int:
    return len(stored["status"].get("nodes", []))


def suspended(stored: dict[str, Any]) -> int:
    return sum(node["state"] == "suspended" for node in stored["status"].get("nodes", []))


def share(stored: dict[str, Any]) -> float:
    return len(stored["rows"]) / stored["steps"]


def filling(stored: dict[str, Any]) -> bool:
    """The next batch waits for rollouts that validators have."""
    return "with validator" in str(stored["status"].get("waits_for"))


SHOTS = (
    Shot("start", 80, 24, lambda p: 2 <= joined(p) < p["members"] - 2),
    Shot("caught", 80, 24, lambda p: suspended(p) >= 2 and share(p) > 0.02),
    Shot("middle", 100, 30, lambda p: share(p) > 0.3 and suspended(p) >= 3 and filling(p)),
    Shot("wide", 140, 45, lambda p: share(p) > 0.6),
    Shot("narrow", 60, 20, lambda p: share(p) > 0.8),
)
AFTER = {"end": (90, 40), "status": (100, 50), "interrupted": (90, 40)}


def inside(target: Path, words: list[str]) -> int:
    """`trainer ...` as ever, except that every picture it draws is also kept in a file."""

    def kept(picture: Picture, width: int, height: int | None = None) -> Any:
        lines = screen(picture, width, height)
        if height is not None:
            aside = target.with_suffix(".part")
            aside.write_text(json.dumps(to_json(picture, width, height)))
            aside.replace(target)
        return lines

    view.screen = kept  # type: ignore[assignment]
    return cli.main(words)


def take(session: Session, shot: Shot, target: Path, deadline: float) -> None:
    """Wait for the moment of a shot and write it: what the terminal shows is what the stored picture draws."""
    session.resize(shot.width, shot.height)
    while True:
        if time.monotonic() > deadline:
            raise SystemExit(
                f"{shot.name}: the moment did not come; the terminal shows:\n" + "\n".join(session.lines())
            )
        time.sleep(0.15)
        try:
            stored = json.loads(target.read_text())
        except (OSError, ValueError):
            continue
        if (stored["width"], stored["height"]) != (shot.width, shot.height) or not shot.when(stored):
            continue
        if session.lines() == drawn(stored):
            session.save(shot.name, stored)
            return


def demo(session: Session, target: Path, words: str) -> None:
    here = shlex.join([sys.executable, str(Path(__file__).resolve()), "--inside", str(target)])
    session.type(f"clear; {here} demo {words}", "Enter")


def prompt(session: Session, deadline: float) -> None:
    """Wait until the shell asks again."""
    while not session.lines() or session.lines()[-1] != "$":
        if time.monotonic() > deadline:
            raise SystemExit("the demo did not end:\n" + "\n".join(session.lines()))
        time.sleep(0.5)


def run(only: set[str], cheats: str, steps: int) -> None:
    with tempfile.TemporaryDirectory(prefix="headwater-screens-") as folder:
        place = Path(folder)
        target = place / "picture.json"
        shots = [shot for shot in SHOTS if shot.name in only]
        if shots or {"end", "status"} & only:
            with Session(place, 80, 24) as session:
                demo(session, target, f"--cheats {cheats} --steps {steps} --dir runs/demo")
                deadline = time.monotonic() + 900
                for shot in shots:
                    take(session, shot, target, deadline)
                session.resize(*AFTER["end"])
                prompt(session, deadline)
                summary = json.loads((place / "runs/demo/summary.json").read_text())
                if "end" in only:
                    session.save("end", {"summary": summary, "run_dir": "runs/demo"})
                if "status" in only:
                    session.resize(*AFTER["status"])
                    status(session, place / "runs/demo")
        if "interrupted" in only:
            with Session(place, *AFTER["interrupted"]) as session:
                target.unlink(missing_ok=True)
                demo(session, target, "--nodes 2 --cheats reward --steps 120 --dir runs/other")
                deadline = time.monotonic() + 400
                while not target.exists() or share(json.loads(target.read_text())) < 0.15:
                    if time.monotonic() > deadline:
                        raise SystemExit("the second demo did not begin")
                    time.sleep(0.3)
                session.type("C-c")
                prompt(session, deadline)
                session.save("interrupted", json.loads(target.read_text()))


def status(session: Session, run_dir: Path) -> None:
    session.type("clear; trainer status runs/demo", "Enter")
    time.sleep(1.0)
    prompt(session, time.monotonic() + 60)
    picture = take_picture(run_dir, Picture(f"run {run_dir.name}", run_dir="runs/demo"))
    session.save("status", to_json(picture, AFTER["status"][0], 0))


def redraw(only: set[str]) -> None:
    """Draw every stored picture again on a terminal of its size."""
    for shot in SHOTS:
        source = HERE / f"{shot.name}.json"
        if shot.name not in only or not source.exists():
            continue
        stored = json.loads(source.read_text())
        with tempfile.TemporaryDirectory() as folder, Session(Path(folder), shot.width, shot.height) as session:
            session.type(shlex.join([sys.executable, str(Path(__file__).resolve()), "--draw", str(source)]), "Enter")
            end = time.monotonic() + 30
            while session.lines() != drawn(stored):
                if time.monotonic() > end:
                    raise SystemExit(f"{shot.name} is not drawn as it should:\n" + "\n".join(session.lines()))
                time.sleep(0.2)
            session.save(shot.name, stored)


def draw(source: Path) -> int:
    """Show one stored picture until somebody ends it."""
    from trainer.terminal import Terminal

    stored = json.loads(source.read_text())
    picture, width, height = from_json(stored)
    with Terminal(sys.stdout) as terminal:
        while True:
            terminal.draw(screen(picture, width, height), (width, stored["height"]))
            time.sleep(0.5)


def fill_page() -> None:
    """Put each NAME.txt into the page, between its marker and the end of the block after it."""
    page = HERE.parent / "terminal.md"
    text = page.read_text(encoding="utf-8")
    for name in (*(shot.name for shot in SHOTS), *AFTER):
        path = HERE / f"{name}.txt"
        if path.exists():
            block = f"<!-- screen: {name} -->\n```text\n{path.read_text(encoding='utf-8')}```"
            text = re.sub(rf"<!-- screen: {name} -->\n```text\n.*?```", lambda _, block=block: block, text, flags=re.S)
    page.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the screens of docs/terminal.md again.")
    every = [*(shot.name for shot in SHOTS), *AFTER]
    parser.add_argument("--only", default=",".join(every), metavar="NAME,..", help=", ".join(every))
    parser.add_argument("--cheats", default="all", help="dishonest nodes of the demo (default: all)")
    parser.add_argument("--steps", type=int, default=300, help="steps of the demo (default: 300)")
    parser.add_argument("--redraw", action="store_true", help="draw the stored pictures again; runs nothing")
    parser.add_argument("--page", action="store_true", help="only copy the screens into docs/terminal.md")
    parser.add_argument("--draw", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    only = set(args.only.split(","))
    if args.draw is not None:
        return draw(args.draw)
    if args.redraw:
        redraw(only)
    elif not args.page:
        run(only, args.cheats, args.steps)
    fill_page()
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[1] == "--inside":
        sys.exit(inside(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(main())
