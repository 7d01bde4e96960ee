"""What members are promised about the ledger, and what of it the archive shows while a run goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

from protocol.envelope import open_envelope
from protocol.ledger import TREE_KIND
from protocol.records import RoleGrant, TreeHead
from protocol.segments import read_segments
from protocol.state import fold
from tests.coordinator_desk import Desk
from tests.scripted_swarm import Swarm


async def test_whoever_hears_of_a_policy_gets_a_tree_head_that_covers_it(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "run")
    desk.book.monotonic = lambda: 100.0

    def promised() -> int:
        return open_envelope(desk.book.tree_head(), run=desk.book.run.id, kind=TREE_KIND).record(TreeHead).size

    await desk.book.commit()
    first = promised()
    desk.book.append("grant", RoleGrant(bytes(32), "relay"))
    await desk.book.commit()
    assert promised() == first, "one signature in two seconds is enough for what is no policy"
    desk.publish(0)
    assert promised() == first, "nothing is promised before it is on the disk"
    await desk.book.commit()
    assert promised() == desk.book.ledger.size > first
    desk.close()


async def test_policies_in_quick_succession_share_a_segment_and_a_kill_loses_none(tmp_path: Path) -> None:
    swarm = Swarm.make(tmp_path / "run", steps=20)
    folder = swarm.run_dir / "ledger"
    async with swarm, asyncio.timeout(90):
        node = await swarm.join("node")
        for step in range(12):
            swarm.publish(step)
            while (await node.heartbeat()).step < step:
                await asyncio.sleep(0.01)
        swarm.kill()
        few = len(list(folder.glob("segment-*.hwl")))
        swarm.serve()
        while (await node.heartbeat()).step < 11:
            await asyncio.sleep(0.05)
        assert few < 12
        log = read_segments(folder, swarm.run)
        assert log.problems == []
        assert [step for _, step in fold([sealed.entry for sealed in log.entries]).policies] == list(range(12))
