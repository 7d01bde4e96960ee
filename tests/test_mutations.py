"""Each invariant of DESIGN 7 has a test that would notice its loss: here the code is broken on purpose, and it must.

A patch in `tests/mutations/` says in its first lines which invariant it breaks, how, and which one test must then fail.
It is applied to a copy of the tree, and that test is run there. A patch that no longer applies fails too: whoever
changes that code writes the patch again.

Not covered: that nothing else fails. A broken invariant may well be seen in more than one place.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("protocol", "shardcast", "environments", "verifier", "trainer", "node", "tests", "examples", "benchmarks")
HEADER = re.compile(
    r"Invariant (?P<number>[1-9]): (?P<words>.+)\nBroken: (?P<broken>.+)\nFails: (?P<fails>tests/\w+\.py::.+)\n\n--- a/"
)
TEST_S = 120
"""Far more than any of these tests needs; a mutation may make a test wait."""


@dataclass(frozen=True)
class Mutation:
    """One patch and what it says about itself."""

    path: Path
    invariant: int
    fails: str

    @staticmethod
    def read(path: Path) -> Mutation:
        found = HEADER.match(path.read_text())
        assert found, f"{path.name} must begin with the lines Invariant, Broken and Fails"
        return Mutation(path, int(found["number"]), found["fails"])


PATHS = sorted((ROOT / "tests" / "mutations").glob("*.patch"))
NAMES = [path.stem for path in PATHS]


def apply(tree: Path, patch: Path, *options: str) -> None:
    done = subprocess.run(
        ["git", "apply", "-C1", *options, str(patch)],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=30,
        # Inside of some repository git would take the paths from its root and, finding none of them, do nothing.
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)},
    )
    assert done.returncode == 0, f"{patch.name} no longer fits the code it breaks; write it again:\n{done.stderr}"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of everything a test needs, to be broken."""
    copy = tmp_path_factory.mktemp("mutations") / "tree"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
    for file in ("pyproject.toml", "constraints.txt", "Makefile"):
        shutil.copy(ROOT / file, copy)
    return copy


def run(tree: Path, test: str) -> subprocess.CompletedProcess[str]:
    words = ["-p", "no:cacheprovider", "--timeout", str(TEST_S), "-rfE", "--tb=line", f"--basetemp={tree}.tmp", test]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=TEST_S + 60,
        # The copy comes before the installed packages, for the processes a test starts too.
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
    )


def test_every_invariant_has_a_mutation() -> None:
    assert {Mutation.read(path).invariant for path in PATHS} == set(range(1, 10))
    for path in PATHS:
        assert path.name.startswith(f"{Mutation.read(path).invariant:02d}-")


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_a_mutation_fits_and_names_a_test_that_is_there(path: Path) -> None:
    apply(ROOT, path, "--check")
    file, _, name = Mutation.read(path).fails.partition("::")
    functions = {
        node.name
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert name.partition("[")[0] in functions


@pytest.mark.heavy
@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_breaking_an_invariant_fails_the_test_that_guards_it(tree: Path, path: Path) -> None:
    mutation = Mutation.read(path)
    apply(tree, path)
    try:
        for line in path.read_text().splitlines():
            if line.startswith("+++ b/"):  # broken code, not unreadable code
                compile((tree / line.removeprefix("+++ b/")).read_text(), line, "exec")
        done = run(tree, mutation.fails)
    finally:
        apply(tree, path, "--reverse")
    assert done.returncode == 1, f"{mutation.fails} does not notice {path.name}:\n{done.stdout[-2000:]}{done.stderr}"
    assert f"FAILED {mutation.fails}" in done.stdout and "1 failed" in done.stdout, done.stdout[-2000:]
    assert "ImportError" not in done.stdout and "NameError" not in done.stdout, done.stdout[-2000:]
