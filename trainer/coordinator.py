"""`trainer serve`: the coordinator of one run.

    members --libp2p--> join, heartbeat, lease.next, lease.failed, job.next, verdict ---+
    members --HTTP----> submissions, jobs --------------------------------------------- +--> ledger --> state
    origin  --file----> published/HEAD.hw ----------------------------------------------+
                                                   state --> batches/ (the learner), ledger/ (sealed), status.json

Everything it decides is a pure function of state, clock and configuration (`leases`, `draws`, `batches`); everything it
promises is in the ledger first. Killed at any moment it starts again from the ledger: missing batch files are built
again, jobs without a verdict are handed out again, segments are sealed, leases go on.

Not covered: training (`learner`), publishing weights (`shardcast`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from environments import registry
from protocol.chain import Chain, pack_updates
from protocol.clock import Clock
from protocol.commands import several
from protocol.control import ControlServer
from protocol.envelope import open_envelope, parse
from protocol.errors import EnvelopeError, LedgerError, ManifestError, ProtocolError, ReasonCode, UsageError
from protocol.files import write_atomic
from protocol.heap import settle_heap
from protocol.host import HostProcess
from protocol.identity import Identity, load_identity
from protocol.logs import EventFile
from protocol.manifest import Run
from protocol.records import (
    BatchClosed,
    Heartbeat,
    JobRequest,
    JoinReply,
    JoinRequest,
    LeaseFailed,
    LeaseRequest,
    RelayReport,
    RunFinished,
    Verdict,
)
from protocol.run_files import key_file, load_chain, read_updates
from protocol.state import PolicyState
from shardcast.errors import ShardcastError
from shardcast.heads import publication_name
from shardcast.publication import Key
from shardcast.records import HEAD_KIND, Head
from shardcast.store import published_heads, read_publication
from shardcast.watch import POLL_S, FolderWatch
from trainer import batches, finished, keys, leases
from trainer.blocking import Blocking
from trainer.book import Book, Changes, day
from trainer.config import RunConfig, check_agrees
from trainer.door import Door, check_listen
from trainer.drawing import Drawing
from trainer.drops import Drops
from trainer.errors import RefusedEntryError
from trainer.ingress import Ingress, sweep_spool
from trainer.judging import Judging
from trainer.leasing import Leasing
from trainer.members import Members
from trainer.news import News
from trainer.reports import Reports
from trainer.status import StatusWriter
from trainer.trainable import Trainable, vocabulary_of

HEAD_LOOK_S = 1.0
"""The origin's head file is looked at when its folder changes, and at least this often."""

SEAL_S = 2.0
"""A policy is followed by a sealed segment at once, or this long after the last one. Seldomer lets auditors of a run
that goes on see less of it; oftener leaves a file for each short step. The ledger itself waits for nothing."""

STATUS_S = 1.0
DIRECTORY_S = 1.0
"""How often what the operator's commands write is looked at: one or two `stat` calls."""

RUN_MARK = "HEADWATER_RUN"


class Coordinator:
    """One run's coordinator process.

    Args:
        config: run.toml.
        clock: the machine's clock; every time the coordinator signs comes from it.
    """

    def __init__(self, config: RunConfig, clock: Clock | None = None) -> None:
        self.config = config
        self.run_dir = config.run_dir
        self.chain = load_run(config)
        self._clock = clock or Clock()
        self.phase = "starting"
        self._policies = Changes()
        """New policies in the ledger."""
        self._unsealed = asyncio.Event()
        """One was entered since the last segment."""
        self.restart = False
        """Ended to begin again in the same process, with keys the run's root changed."""
        self.news = News()
        self.files = batches.Files(self.run_dir)
        self.news.log = EventFile(self.run_dir / "logs" / "coordinator.jsonl", {"run": self.chain.genesis.id})
        self.book = Book.open(
            self.chain, self._key, config.state_dir, self._clock.now_ms, self.news.log, config.coordinator.linger_s
        )
        try:
            self._build(self.book.coordinator)
        except BaseException:
            self.book.close()
            raise

    def _key(self, public: bytes) -> Identity:
        return load_identity(key_file(self.run_dir, "coordinator", public))

    @property
    def run(self) -> Run:
        """The run as its manifest is now."""
        return self.book.run

    def _build(self, identity: Identity) -> None:
        self.prompt_ids = batches.tokenizer_prompts(self.run_dir / "model", _prompts(self.run))
        self.members = Members(self.book, self.config, self.news)
        self.reports = Reports(self.book, self.members, self.news, self.members.address_of)
        self.members.distrusted = self.reports.distrusted
        bounds = leases.Bounds(
            max_bytes=self.config.ingress.max_submission_bytes,
            open_leases=self.config.coordinator.uncollected_leases,
        )
        self.control = ControlServer(
            run=self.run,
            identity=identity,
            sequences=self.book.sequences,
            guard=self.book.guard,
            clock=self._clock,
        )
        uploading: Callable[[], frozenset[bytes]] = lambda: self.ingress.leases_uploading()  # noqa: E731
        self.leasing = Leasing(self.book, self.members, self.news, bounds, uploading)
        self.judging = Judging(
            self.book,
            self.members,
            self.leasing,
            self.files,
            self.news,
            self.config.coordinator.job_deadline_s,
            Drawing(self.book, self.members),
            Drops(self.book, self.files, self.news, self.leasing.close_all_of),
            Trainable(vocabulary_of(self.run_dir / "model"), self.run.manifest.model.max_context),
            self.prompt_ids,
        )
        self.ingress = Ingress(self.book, self.judging, self.control, self.files, self.config.ingress, self.members)
        self.host = HostProcess(
            home=self.config.state_dir,
            key=key_file(self.run_dir, "coordinator_transport", self.run.manifest.coordinator_transport),
            listen=self.config.control.listen,
            handler=self.control.handle,
            log=self.run_dir / "logs" / "coordinator-host.log",
            max_connections=self.config.control.max_connections,
        )
        self.door = Door(self.ingress.application(), self.config.ingress.listen, self.config.ingress.max_connections)
        self.status = StatusWriter(
            self.run_dir / "status.json",
            self.book,
            self.members,
            self.news,
            lambda: (self.control.http_fallbacks, self.host.restarts),
            self.judging.checks.counts,
        )
        self.control.updates = pack_updates(self.book.state.chain.updates) if self.book.state.chain else b""
        self.blocking = Blocking(self.run_dir, self._block, self.news)
        self._serve_kinds()

    def _block(self, addresses: list[str]) -> None:
        self.members.block(addresses)
        self.door.block(addresses)
        self.host.block(addresses)

    def _serve_kinds(self) -> None:
        self.control.on("join", JoinRequest, self._join)
        self.control.on("heartbeat", Heartbeat, self.members.heartbeat)
        self.control.on("lease.next", LeaseRequest, self.leasing.next)
        self.control.on("lease.failed", LeaseFailed, self.leasing.failed)
        self.control.on("job.next", JobRequest, self.judging.next)
        self.control.on("verdict", Verdict, self.judging.verdict)
        self.control.on("relay.report", RelayReport, self.reports.report)

    async def _join(self, member: Any, request: JoinRequest, attachment: bytes) -> JoinReply:
        reply = await self.members.join(member, request, attachment)
        if request.role == "validator":
            self.judging.forget_deliveries(member.key)
        return reply

    # --- the life of a run ----------------------------------------------------------------------------------------

    async def serve(self) -> int:
        """Serve until the run is finished or somebody stops it.

        Returns:
            0 when the run is finished and sealed, 128 + the signal's number when stopped.
        """
        stopped = _signals()
        try:
            await self._begin()
            finished = asyncio.create_task(self._until_finished(), name="the run")
            await self._attend(finished, stopped)
            if self.restart:
                return 0
            return 0 if self.phase == "finished" else 128 + stopped.result()
        finally:
            await self._end()

    def conclude(self) -> int:
        """What a start of a run that is over still does: complete what a crash left open, and say that it is over."""
        try:
            self._rebuild_batches()
            self.book.seal(self.run_dir / "ledger")
            if not finished.is_known(self.run_dir):
                self.status.write("finished")
            for sentence in finished.said(self.run_dir, self.run.manifest.steps, "serve"):
                self.news.say(sentence)
        finally:
            self.book.close()
            self.book.log.close()
        return 0

    async def _begin(self) -> None:
        """Bring disk and ledger into step, then open both doors."""
        for role in ("validator", "relay"):
            self.book.grant(role, self.config.grants.keys(role))
        self.judging.drawing.keep_in_step()
        await self.book.commit()
        sweep_spool(
            self.files, {held.lease_id for held in self.book.state.leases.values() if held.submission is not None}
        )
        self._rebuild_batches()
        self.book.seal(self.run_dir / "ledger")
        check_listen(self.config.control.listen)
        await self.host.start()
        await self.door.start()  # second: members fall back to HTTP when it answers and libp2p does not
        again = f" again, {self.book.ledger.size} ledger entries" if self.book.ledger.incarnation else ""
        self.news.say(f"the coordinator serves run {self.run.id.hex()[:16]}{again}")

    async def _attend(self, finished: asyncio.Task[None], stopped: asyncio.Future[int]) -> None:
        """Run everything beside everything else; the first failure ends all."""
        beside: list[Coroutine[Any, Any, None]] = [
            self._watch_heads(),
            self._seal_policies(),
            self._close_batches(),
            self._write_status(),
            self._watch_directory(),
            self.leasing.expire_forever(),
            self.judging.redraw_forever(),
            self.members.prove_forever(),
        ]
        tasks = [asyncio.create_task(work) for work in beside]
        try:
            waiting: list[asyncio.Future[Any]] = [*tasks, finished, stopped]
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
            self.restart = not finished.done() and not stopped.done()  # the watch of the run directory asked for it
        finally:
            for task in [*tasks, finished]:
                if not task.done():
                    task.cancel()
            await asyncio.gather(*tasks, finished, return_exceptions=True)

    async def _until_finished(self) -> None:
        """Wait for the last policy, then for open verdicts, seal, and tell whoever still asks that it is over."""
        steps = self.run.manifest.steps
        while self.book.state.newest_policy is None or self.book.state.newest_policy.step < steps:
            ticket = self._policies.ticket()
            self.phase = "waiting for weights" if self.book.state.newest_policy is None else "running"
            await self._policies.wait(ticket, 5.0)
        self.phase = "draining"
        await self._drain()
        if self.book.state.finished is None:
            self.judging.drawing.reveal_all()  # in one transaction with the end: nothing is drawn after it
            self.book.append("run.finished", RunFinished(steps, "all steps are done"))
            await self.book.commit()
            self.news.say(f"the run is finished: {several(steps, 'step')}")
        self.book.seal(self.run_dir / "ledger")
        self.phase = "finished"
        self.status.write(self.phase)
        await asyncio.sleep(self.config.coordinator.linger_s)

    async def _drain(self) -> None:
        """Give open verdicts `drain_s` to arrive."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.config.coordinator.drain_s
        while (
            self.book.window.unjudged or self.ingress.uploading or self.judging.checks.waiting
        ) and loop.time() < end:
            ticket = self.book.changes.ticket()
            await self.book.changes.wait(ticket, min(1.0, end - loop.time()))
        if self.book.window.undecided:
            self.news.say(f"left without a decision: {several(len(self.book.window.undecided), 'submission')}")

    async def _end(self) -> None:
        """A clean stop: nobody new, everything durable, everything sealed."""
        await self.door.close()
        await self.host.close()
        try:
            await self.book.commit()
            self.book.seal(self.run_dir / "ledger")
            ended = "starting" if self.restart else "stopped"  # a restart in place is no end of the run
            self.status.write(self.phase if self.phase == "finished" else ended)
        finally:
            self.book.close()
            self.book.log.close()

    # --- beside each other ----------------------------------------------------------------------------------------

    async def _watch_heads(self) -> None:
        """Follow the origin: each new head becomes a `policy` event."""
        path = self.run_dir / "published" / "HEAD.hw"
        seen: tuple[int, int] | None = None
        watch = FolderWatch()
        try:
            while True:
                watch.add(path.parent)
                mark = _mark(path)
                if mark is not None and mark != seen:
                    seen = mark
                    await self._take_head(path)
                await watch.wait(POLL_S if mark is None else HEAD_LOOK_S)
        finally:
            watch.close()

    async def _seal_policies(self) -> None:
        """Copy the ledger into the archive after each new policy, at most every `SEAL_S`."""
        while True:
            await self._unsealed.wait()
            self._unsealed.clear()
            await asyncio.to_thread(self.book.seal, self.run_dir / "ledger")
            await asyncio.sleep(SEAL_S)

    async def _take_head(self, path: Path) -> None:
        """Take in the newest head and those before it: several may have come while nobody looked."""
        newest = self.book.state.newest_policy
        after = None if newest is None else (newest.epoch, newest.step)
        try:
            raw = path.read_bytes()
            envelope = open_envelope(raw, run=self.run.id, kind=HEAD_KIND)
            if envelope.signer not in self.book.origins():
                raise EnvelopeError("signed by a key that is not the run's origin's")
            head = envelope.record(Head)
            between = self._between(path.parent, after, (head.epoch, head.step))
        except (OSError, ProtocolError, ShardcastError) as exc:
            self.news.say(f"{path} does not hold ({exc}); the origin writes a new one with the next step")
            return
        if newest is not None and (head.epoch, head.step) <= (newest.epoch, newest.step):
            self._compare(newest, head)
            return
        for subject in [*between, raw]:
            self._enter_policy(path.parent, subject)
        await self.book.commit()
        self._unsealed.set()
        self._policies.notify()
        self.book.log.event("policy", step=head.step, epoch=head.epoch, root=head.root)

    def _enter_policy(self, published: Path, subject: bytes) -> None:
        """A head the ledger does not take is left out: its key was revoked after it was signed, perhaps by a thief."""
        try:
            self.book.append("policy", subject=subject)
        except RefusedEntryError as exc:
            step = parse(subject).record(Head).step
            self.news.say_once(
                f"the publication of step {step} in {published} does not count ({exc}); if no later one does, the "
                "operator must start the origin again with the key that the manifest names now"
            )

    def _between(self, published: Path, after: Key | None, last: Key) -> list[bytes]:
        """Heads before `last` that the ledger lacks. The folder holds every publication since the run began, so it is
        listed only when one was missed; the newest is checked either way."""
        if after is not None and last <= after:
            return []
        if after is not None and last == (after[0], after[1] + 1):
            if (published / publication_name(last) / "head.hw").exists():
                read_publication(published / publication_name(last), self.run)
            return []
        found = published_heads(published, self.run, after)
        return [subject for subject, head in found if (head.epoch, head.step) < last]

    def _compare(self, newest: PolicyState, head: Head) -> None:
        known = self.book.state.policies.get((head.epoch, head.step), newest)
        if (known.epoch, known.step) == (head.epoch, head.step) and known.root != head.root:
            self.news.say(
                f"the origin published two different weights for step {head.step}; the first stays. The operator must "
                "stop the origin and find out why before going on"
            )

    async def _close_batches(self) -> None:
        """Close each batch as soon as it can be: ledger first, then the file the learner waits for."""
        while True:
            ticket = self.book.changes.ticket()
            groups = batches.choose(self.book.state, self.book.window)
            if not groups:
                await self.book.changes.wait(ticket, 5.0)
                continue
            step = self.book.window.batches
            policy = self.book.state.newest_policy
            assert policy is not None
            entries = batches.entries_of(self.book.state, groups)
            raw = batches.build(self.run, self.book.state, self.files, step, policy.epoch, entries, self.prompt_ids)
            self.book.append("batch", batches.closed(step, policy.epoch, entries, raw))
            await self.book.commit()
            await asyncio.to_thread(write_atomic, self.files.batch(step), raw)
            self.book.log.event("batch", step=step, rollouts=len(entries), groups=len(groups))
            for group in groups:
                self.status.staleness.add(step - group.step, len(group.rollouts))

    def _rebuild_batches(self) -> None:
        """Write batch files that the ledger names and the disk lost, and count what was trained on."""
        self.files.batch(0).parent.mkdir(exist_ok=True)
        for step, held in sorted(self.book.state.batches.items()):
            self._count_staleness(held.closed)
            path = self.files.batch(step)
            if path.exists():
                continue
            raw = batches.build(
                self.run, self.book.state, self.files, step, held.closed.epoch, held.closed.entries, self.prompt_ids
            )
            if batches.closed(step, held.closed.epoch, held.closed.entries, raw).digest != held.closed.digest:
                raise LedgerError(
                    f"batch {step} built again from the archive is not the one in the ledger; the operator must "
                    "restore the run directory or install the release that wrote it",
                    ReasonCode.BATCH_WRONG,
                )
            write_atomic(path, raw)

    def _count_staleness(self, closed: BatchClosed) -> None:
        state = self.book.state
        for entry in closed.entries:
            lease = state.leases[state.submissions[entry.submission].lease_id].lease
            self.status.staleness.add(closed.step - lease.step, 1)

    async def _watch_directory(self) -> None:
        """Follow what the operator's commands write: updates of the manifest, blocked addresses. Returns when a key of
        this very process changed: it must begin again."""
        while True:
            manifest = self.run.manifest
            if self._take_updates():
                self.control.updates = pack_updates(self.book.state.chain.updates) if self.book.state.chain else b""
                await self.book.commit()
                self.book.seal(self.run_dir / "ledger")
                self.book.changes.notify()
            if self.run.manifest.coordinator_transport != manifest.coordinator_transport:
                self.news.say("the libp2p key was changed by the run's root: beginning again with the new one")
                return
            if self._next_coordinator() not in (b"", self.run.manifest.coordinator):
                self.news.say("the coordinator's key was changed by the run's root: beginning again with the new one")
                return
            self.book.check_key()
            self._say_what_ends()
            self.blocking.refresh()
            await asyncio.sleep(DIRECTORY_S)

    def _take_updates(self) -> int:
        """Enter new links of the manifest chain, up to one that changes the coordinator's own key. Returns how many."""
        taken, chain = 0, self.book.state.chain
        assert chain is not None
        for raw in read_updates(self.run_dir, len(chain.links)):
            try:
                chain = chain.extend(raw)
            except ManifestError as exc:
                self.news.say_once(f"an update in {self.run_dir}/updates does not hold and is not followed: {exc}")
                break
            if not self.book.timely(chain):
                self._say_untimely(chain)
                break
            if chain.current.manifest.coordinator != self.book.coordinator.public:
                break  # entered at the next start, which is at once
            self.book.update(chain.links[-1])
            taken += 1
            self.news.say(f"the run's root changed the manifest: {keys.in_words(chain.links[-1].update)}")
            for gone in chain.links[-1].update.revocations:
                node = self.book.state.nodes.get(gone.key)
                if node is not None:
                    self.leasing.close_all_of(node)
        return taken

    def _next_coordinator(self) -> bytes:
        """The coordinator key that the run directory's next link names; empty when there is none that holds."""
        chain = self.book.state.chain
        assert chain is not None
        for raw in read_updates(self.run_dir, len(chain.links))[:1]:
            try:
                longer = chain.extend(raw)
            except ManifestError:
                return b""
            return longer.current.manifest.coordinator if self.book.timely(longer) else b""
        return b""

    def _say_untimely(self, chain: Chain) -> None:
        """An update from a machine whose clock is far from this one's. It is looked at again every second."""
        assert self.book.state.chain is not None
        found = chain.untimely(len(self.book.state.chain.delegations), self.book.now_ms())
        if found is None:
            return
        self.news.say_once(
            f"link {len(chain.links)} of the manifest's chain waits: the root lets its key act from "
            f"{day(found.not_before)} to {day(found.expires)}, and here it is {day(self.book.now_ms())}. One of the "
            "two machines' clocks is wrong; the operator must set it right"
        )

    def _say_what_ends(self) -> None:
        """Keys in use whose delegation ends soon: the coordinator stops when its own does."""
        for text in keys.ending(self.book.state.chain, self.book.now_ms(), str(self.run_dir)):
            self.news.say_once(text)

    async def _write_status(self) -> None:
        while True:
            self.status.write(self.phase)
            await asyncio.sleep(STATUS_S)


def load_run(config: RunConfig) -> Chain:
    """The manifest chain of a run directory.

    Raises:
        UsageError: half-written, or run.toml and manifest disagree.
    """
    run_dir = config.run_dir
    needed = ["manifest.hw", "keys/coordinator.pem", "keys/coordinator-transport.pem", "model/tokenizer.json"]
    missing = [name for name in needed if not (run_dir / name).is_file()]
    if missing:
        raise UsageError(
            f"{run_dir} is no whole run directory: {', '.join(missing)} missing; restore it from your backup, or make "
            "a new run with: trainer init DIR"
        )
    chain = load_chain(run_dir)
    check_agrees(config, chain.current.manifest.steps, chain.current.manifest.profile)
    return chain


def _prompts(run: Run) -> Callable[[bytes, int], str]:
    loaded = {spec.digest: registry.load(spec) for spec in run.manifest.environments}
    return lambda environment, task: loaded[environment].task(task).prompt


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino


def _signals() -> asyncio.Future[int]:
    """A future that holds the first SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def on_signal(number: int) -> None:
        if not stopped.done():
            stopped.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stopped


def main(config: RunConfig, as_json: bool = False) -> int:
    """Run the coordinator. Exit codes: 0 finished, 1 failed, 2 could not start, 130 or 143 stopped by a signal."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    started = time.monotonic()

    async def serve() -> tuple[int, Coordinator]:
        while True:
            coordinator = Coordinator(config)
            os.environ.setdefault(RUN_MARK, coordinator.run.id.hex())
            code = coordinator.conclude() if coordinator.book.over else await coordinator.serve()
            if not coordinator.restart:
                return code, coordinator

    settle_heap()
    code, coordinator = asyncio.run(serve())
    if as_json:
        done = {
            "run": coordinator.run.id.hex(),
            "finished": code == 0,
            "batches": coordinator.book.window.batches,
            "seconds": round(time.monotonic() - started, 3),
        }
        sys.stdout.write(json.dumps(done) + "\n")
    return code
