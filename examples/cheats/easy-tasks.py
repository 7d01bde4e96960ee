"""A node that answers other tasks than it was leased: the easiest ones it can find.

    python examples/cheats/easy-tasks.py --truth LOG join --role inference --run CODE [--home DIR] [--name NAME]

This one is no engine. It is the ordinary node with one method changed: the lease's tasks are replaced by the ones with
the shortest answers before anything is sampled. Everything after that is honest and fits together: the engine is the
built-in one, seeds are derived for the tasks it chose, proofs, tokens and rewards hold for them, and the submission
names them openly. Caught by the task, without any model: the lease says which tasks stand in which place.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import ClassVar

from _common import TruthLog

import node.cli
import node.inference
from environments.base import Environment
from node.inference import InferenceNode, Work

SEARCHED = 512
"""Task indices it looks through for easy ones."""


class EasyTasks(InferenceNode):
    truth: ClassVar[TruthLog]

    async def do(self, assignment: Work) -> None:
        lease = assignment.lease
        easy = easiest(assignment.environment, len(lease.tasks), lease.tasks)
        for task in lease.tasks:
            for sample in range(lease.samples):
                self.truth.write(f"{lease.lease_id.hex()}:{task}:{sample}", True)
        await super().do(dataclasses.replace(assignment, lease=dataclasses.replace(lease, tasks=easy)))


def easiest(environment: Environment, count: int, leased: tuple[int, ...]) -> tuple[int, ...]:
    """The `count` task indices with the shortest answers, none of the leased ones among them."""
    tasks = [environment.task(index) for index in range(SEARCHED) if index not in leased]
    tasks.sort(key=lambda task: (len(task.answer), len(set(task.answer)), task.index))
    return tuple(task.index for task in tasks[:count])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True, metavar="LOG", help="own log of what it did (JSONL)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="join ...", help="as for `node`")
    args = parser.parse_args()
    EasyTasks.truth = TruthLog(args.truth)
    node.inference.InferenceNode = EasyTasks  # type: ignore[misc]
    sys.argv = ["node", *args.command]
    return node.cli.main()


if __name__ == "__main__":
    sys.exit(main())
