"""The project as a stranger meets it: commands, imports, names, dependencies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PACKAGES = ("protocol", "shardcast", "environments", "verifier", "trainer", "node")


@pytest.mark.parametrize("command", ["node", "trainer", "verifier", "shardcast"])
def test_help_imports_nothing_heavy(command: str) -> None:
    """`--help` answers at once: neither torch nor transformers nor libp2p is imported."""
    program = (
        "import sys\n"
        f"sys.argv = ['{command}', '--help']\n"
        f"from {command}.cli import main\n"
        "try:\n    main()\nexcept SystemExit as exc:\n    code = exc.code\nelse:\n    code = 0\n"
        "heavy = sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'transformers', 'libp2p', 'trio'})\n"
        "print('HEAVY', heavy, code)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "HEAVY [] 0" in done.stdout or "HEAVY [] None" in done.stdout, done.stdout + done.stderr
    assert "xample" in done.stdout, "help shows an example"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["-e", "console.log(40 + 2)"], "42"), (["--version"], "v"), (["-p", "process.argv0.length > 0"], "true")],
)
def test_node_js_still_answers_in_our_environment(arguments: list[str], expected: str) -> None:
    """Installing headwater never breaks Node.js: our `node` hands over to the one further down PATH."""
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(["node", *arguments], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(expected)


def test_npm_still_answers_in_our_environment() -> None:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(["npm", "--version"], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.match(r"\d+\.\d+", done.stdout)


def test_packages_never_mention_the_demo_s_deceivers() -> None:
    """Nothing that checks may know what it is going to be shown."""
    for package in ("protocol", "shardcast", "environments", "verifier"):
        for path in (ROOT / package).rglob("*.py"):
            assert "cheat" not in path.read_text().lower(), path


def test_files_stay_short_enough_to_read() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            lines = len(path.read_text().splitlines())
            assert lines <= 600, f"{path} has {lines} lines"


def test_no_file_loads_pickles() -> None:
    """Invariant 7: no pickle, no code from peers."""
    bad = re.compile(r"\bimport pickle\b|pickle\.load|torch\.load\(|trust_remote_code=True|weights_only=False")
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert not bad.search(path.read_text()), path


def test_every_package_is_shipped() -> None:
    """A folder with code that the wheel would leave out breaks every installation but a clone."""
    shipped = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.parent.relative_to(ROOT).parts)
            assert name in shipped, f"{name} is missing from [tool.setuptools] packages"


@pytest.mark.heavy
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_dependencies_resolve_to_wheels_only(version: str) -> None:
    """No dependency needs a compiler on any Python we name.

    Two of libp2p's dependencies are published as source only; each is one pure Python module.
    """
    done = subprocess.run(
        [
            str(BIN / "uv"),
            "pip",
            "compile",
            "--quiet",
            "--python-version",
            version,
            "--only-binary",
            ":all:",
            "--no-binary",
            "varint",
            "--no-binary",
            "python-baseconv",
            "--extra",
            "environments",
            "--extra",
            "dev",
            "--constraint",
            "constraints.txt",
            "--python-platform",
            "x86_64-manylinux_2_28",
            "pyproject.toml",
        ],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^fastecdsa==[4-9]", done.stdout, re.M)
    assert re.search(r"^torch==", done.stdout, re.M)
