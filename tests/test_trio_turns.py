"""What a host process spares its scheduler: locks that are free, writes that fit."""

from __future__ import annotations

import os
import socket

import trio

from protocol.libp2p_fixes import READ_AHEAD, ReadAhead
from protocol.trio_turns import QuickLock, write_now


class Steps(trio.abc.Instrument):
    count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


def pair() -> tuple[ReadAhead, ReadAhead]:
    left, right = socket.socketpair()
    return tuple(ReadAhead(trio.SocketStream(trio.socket.from_stdlib_socket(one))) for one in (left, right))


def test_a_free_lock_costs_no_turn_and_a_held_one_goes_round_in_order() -> None:
    async def main() -> tuple[int, list[int]]:
        lock, steps, order = QuickLock(), Steps(), []
        trio.lowlevel.add_instrument(steps)
        for _ in range(50):
            async with lock:
                pass
        trio.lowlevel.remove_instrument(steps)

        async def take(number: int) -> None:
            async with lock:
                order.append(number)
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            async with lock:
                for number in range(5):
                    await nursery.start(started, take, number)
            async with lock:  # those who wait are before us
                order.append(5)
        return steps.count, order

    async def started(function, number, *, task_status) -> None:
        task_status.started()
        await function(number)

    count, order = trio.run(main)
    assert count == 0
    assert sorted(order) == [0, 1, 2, 3, 4, 5] and order[-1] == 5


def test_what_is_written_arrives_whole_and_in_order_whatever_the_sizes_and_the_room() -> None:
    sent = [os.urandom(size) for size in (1, 2, 18, READ_AHEAD - 1, READ_AHEAD, READ_AHEAD + 1, 300_000, 3, 900_000, 2)]
    wanted = b"".join(sent)
    asked = [2, 16, 1, READ_AHEAD - 1, 70_000, 3, READ_AHEAD, 5]

    async def main() -> bytes:
        left, right = pair()

        async def write(half: list[bytes]) -> None:
            for piece in half:
                await left.write(piece)

        got = b""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, sent)
            turn = 0
            with trio.fail_after(20):
                while len(got) < len(wanted):
                    size = asked[turn % len(asked)]
                    piece = await right.read(size)
                    assert 0 < len(piece) <= size
                    got, turn = got + piece, turn + 1
        await left.close()
        assert await right.read(5) == b"", "the end is told"
        return got

    assert trio.run(main) == wanted


def test_what_was_read_ahead_is_not_given_out_once_we_closed_the_socket() -> None:
    async def main() -> tuple[bytes, bytes]:
        left, right = pair()
        await left.write(b"first, second")
        first = await right.read(5)
        await right.close()
        return first, await right.read(8)

    assert trio.run(main) == (b"first", b"")


def test_a_write_takes_what_fits_and_nothing_of_a_closed_socket() -> None:
    async def main() -> tuple[int, int, int]:
        left, _right = pair()
        large = bytes(1 << 24)
        taken = write_now(left.stream.socket, large)
        full = write_now(left.stream.socket, large)
        await left.close()
        return taken, full, write_now(left.stream.socket, b"more")

    taken, full, closed = trio.run(main)
    assert 0 < taken < 1 << 24
    assert full == closed == 0
