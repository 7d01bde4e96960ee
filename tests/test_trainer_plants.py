"""Phantoms: some jobs have a known answer, nobody can tell which, and a validator that waves them through is found."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from environments.registry import make
from protocol import codec, draws, phantoms
from protocol.envelope import parse
from protocol.errors import ReasonCode
from protocol.identity import Identity
from protocol.records import ACCEPT, REJECT, Job, Lease, Submission
from protocol.state import ACCEPTED, RunState
from tests.checked_run import CheckedRun
from tests.judge_rig import TINY, make_rig
from tests.scripted_swarm import actor_identity
from tests.test_verifier_bf16 import measured
from trainer import batches, plants
from trainer.headline import head
from trainer.picture import Picture
from trainer.window import Window
from verifier.audit import Options, audit
from verifier.judge import judge
from verifier.model import load_policy
from verifier.profiles import load_to_sample, load_to_verify
from verifier.spot import wider

SECRET = bytes(range(32))


class PlantedRun(CheckedRun):
    """A run beside which the operator works as phantoms: `phantom 0 5` is key 5 of period 0."""

    phantom = ""
    """Who of them is there."""
    waiting: Iterator[str] = iter(())
    """Who comes next."""

    def secret_of(self, period: int) -> bytes:
        return draws.period_secret(self.book.secret, period)

    def identity_of(self, name: str) -> Identity:
        if not name.startswith("phantom ") or name.endswith(" t"):
            return actor_identity(name)
        _, period, number = name.split()
        return phantoms.identity(self.secret_of(int(period)), int(number))

    def send(self, lease: Lease, made: Submission) -> int:
        held = self.state.leases[lease.lease_id]
        found = self.book.plants.phantom(held.owner)
        if found is not None and self.book.plants.is_plant(held):
            spoilt = plants.spoil(self.secret_of(found.period), lease, made.rollouts, self.book.run.manifest)
            made = dataclasses.replace(made, rollouts=tuple(spoilt))
        return super().send(lease, made)

    async def go_on(self, checked: bool = True) -> None:
        """One more batch of two honest nodes and a phantom; the next one comes when it was suspended."""
        key = self.identity_of(self.phantom).public if self.phantom else b""
        if not self.phantom or self.state.nodes[key].state == "suspended":
            self.phantom = next(self.waiting)
        await self.step(["ann", "bob", self.phantom], checked=checked)

    def of_phantoms(self) -> set[int]:
        return {one.index for one in self.book.plants.submissions}

    def plants(self) -> set[int]:
        """Submissions that were altered."""
        leases = self.state.leases
        return {one.index for one in self.book.plants.submissions if self.book.plants.is_plant(leases[one.lease_id])}

    def found(self) -> set[str]:
        """Validators that were suspended for what they said."""
        return {node.name for node in self.state.nodes.values() if node.reason == ReasonCode.VALIDATOR_WRONG}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a run. No group is drawn for a check: whoever is found is found by a phantom's submission."""
    monkeypatch.setattr(draws, "SPOT_CHECKS", 0.0)
    made: list[PlantedRun] = []

    async def begin(*names: str, validators: int = 3, liars: set[str] = frozenset()) -> PlantedRun:
        made.append(await PlantedRun.make(tmp_path, steps=60, validators=validators, liars=set(liars)))
        made[0].waiting = iter(names)
        return made[0]

    yield begin
    for run in made:
        run.close()


SOON = [f"phantom {period} {number}" for number in (0, 5, 1, 6) for period in range(4)]
"""Those that alter half of what they send, then those that alter a quarter."""


async def test_a_validator_that_never_rejects_is_found_by_plants_where_every_node_is_honest(planted) -> None:
    """It computes all it should and hands over true numbers. A plant reaches it with chance 2/3: first, or as the
    second who is asked when an honest one rejects. Of twelve none does with chance 2e-6."""
    run = await planted(*SOON)
    run.waving = {"validator-1"}
    while not run.found():
        await run.go_on()
        assert len(run.plants()) <= 12
    assert run.found() == {"validator-1"}
    (said,) = run.accusations()
    assert (said.outcome, run.book.plants.counts()["contradicted"]) == (REJECT, 1)
    assert run.book.plants.counts()["sent"] >= run.book.plants.counts()["altered"] == len(run.plants()) > 0
    honest = [node for node in run.state.nodes.values() if node.name in ("ann", "bob", "validator-0", "validator-2")]
    assert all(node.state == "active" or node.role == "validator" for node in honest)
    assert all(node.state != "suspended" for node in honest) and run.state.problems == []
    assert "validator-1 is suspended" in run.news()
    picture = Picture("run x", run_dir="x")
    picture.status = run.coordinator.status.picture("running")
    shown = ["".join(text for text, _ in line) for line in head(picture, [], 120)]
    (line,) = [line for line in shown if line.startswith("plants")]
    assert f"{len(run.plants())} altered on purpose" in line and "1 validator found to be wrong" in line


async def test_a_validator_that_rejects_what_is_true_is_found_by_honest_work_of_phantoms(planted) -> None:
    run = await planted(*[f"phantom 0 {number}" for number in (4, 3, 2)])
    run.refusing = {"validator-1"}
    for _ in range(30):
        index = run.work(next(name for name in ("phantom 0 4", "phantom 0 3", "phantom 0 2") if free(run, name)))
        await run.judge_all(index)
        await run.check()
        if run.found():
            break
    assert run.found() == {"validator-1"}
    (said,) = run.accusations()
    assert (said.outcome, said.reason) == (ACCEPT, "holds")


def free(run: PlantedRun, name: str) -> bool:
    return run.decide(name).kind == "issue"


async def test_honest_validators_are_never_accused_and_the_honest_work_of_phantoms_is_trained(planted) -> None:
    """Nothing that was altered is, the audit says how much there was, and a restart changes nothing."""
    run = await planted(*[f"phantom 0 {number}" for number in (0, 5, 1, 6, 2, 7, 3, 4)])
    trained: set[int] = set()
    while not trained & run.of_phantoms() or len(run.plants()) < 2:
        await run.go_on()
        trained = {index for index, _ in run.state.trained}
    assert run.found() == set() and run.accusations() == [] and "Nobody is accused" not in run.news()
    checks = run.judging.checks.counts()
    assert checks["left_out"] == checks["waiting"] == 0 < checks["checked"]
    assert not trained & run.plants()
    rejected = {
        index for index in run.plants() if "rejected" in {o.status for o in run.state.submissions[index].outcomes}
    }
    assert rejected == run.plants() - set(run.book.window.undecided)
    before, known = run.book.plants.counts(), run.plants()
    run.close()
    run.open()
    assert (run.book.plants.counts(), run.plants()) == (before, known)
    await run.seal()
    report = audit(run.run_dir, Options())
    assert report.failures == []
    assert (report.phantom_submissions, report.plants) == (before["sent"], before["altered"])
    assert any("altered on purpose" in line for line in report.lines())


async def test_an_audit_names_a_coordinator_that_trains_a_plant(planted) -> None:
    """All validators lie, so nobody else's word is against it; the batch is named all the same."""
    run = await planted(*SOON[:1], *SOON[4:5], validators=2, liars={"validator-0", "validator-1"})
    run.book.window.is_plant = lambda held: False
    while not run.plants() & {index for index, _ in run.state.trained}:
        await run.go_on(checked=False)
        assert len(run.of_phantoms()) < 64
    wrong = {
        f"batches/step-{step:08d}.hwb"
        for step, batch in run.state.batches.items()
        if run.plants() & {entry.submission for entry in batch.closed.entries}
    }
    await run.seal()
    failures = audit(run.run_dir, Options()).failures
    named = {one.record for one in failures if one.reason == ReasonCode.BATCH_WRONG}
    assert named == wrong != set()
    assert {one.reason for one in failures} == {ReasonCode.BATCH_WRONG, ReasonCode.VERDICT_WRONG}


async def test_a_plant_that_liars_accept_enters_no_batch_and_the_run_goes_on(planted) -> None:
    run = await planted(*SOON, validators=2, liars={"validator-0", "validator-1"})
    while not run.plants() - set(run.book.window.undecided):
        await run.go_on(checked=False)
    for _ in range(2):
        await run.go_on(checked=False)
    accepted = {i for i in run.plants() if {o.status for o in run.state.submissions[i].outcomes} == {ACCEPTED}}
    assert accepted == run.plants() - set(run.book.window.undecided) != set(), "no check was made"
    assert not run.plants() & {index for index, _ in run.state.trained}


# --- what gives a phantom away ----------------------------------------------------------------------------------------


def passed_over(run: PlantedRun) -> set[bytes]:
    """Owners of groups that a batch left out although it took later ones: what everybody can see in the ledger."""
    state, out = RunState(), set()
    window = Window(run.book.run.manifest.leases.max_staleness, state)
    for stored in run.book.ledger.entries():
        entry = stored.entry()
        if entry.event == "batch":
            due = batches.choose(state, window)
            state.apply(stored.index, entry)
            held = {(one.submission, one.rollout) for one in state.batches[len(state.batches) - 1].closed.entries}
            for group in due:
                lease = state.leases[group.lease_id]
                if (lease.submission, group.rollouts[0]) not in held:
                    out.add(lease.owner)
        else:
            state.apply(stored.index, entry)
        window.observe(stored.index, entry)
    return out


@pytest.mark.parametrize("trained", [True, False])
async def test_no_batch_gives_a_phantom_away(planted, trained: bool) -> None:
    """Batches take the oldest groups first. One that took nothing of a phantom would name it to every validator while
    its key is in use; that is why its honest work is trained."""
    run = await planted(*[f"phantom {period} {number}" for number in (4, 3) for period in range(4)])
    if not trained:
        run.book.window.is_plant = lambda held: run.book.plants.phantom(held.owner) is not None
    for _ in range(4):
        await run.go_on()
    owners, seen = {run.state.submissions[i].owner for i in run.of_phantoms()}, passed_over(run)
    assert owners and (seen == set() if trained else seen and seen <= owners)


async def test_a_validator_sees_of_a_phantom_what_it_sees_of_a_newcomer(planted) -> None:
    """Job, upload and ledger of strangers who come side by side; some of them are phantoms, and of those some alter."""
    run = await planted()
    names = ["ann", "bob", "eve", *SOON[:8]]
    shapes: dict[str, object] = {}
    lengths: dict[bool, list[float]] = {True: [], False: []}
    altered = 0
    for name in names:
        for _ in range(2):
            if run.decide(name).kind != "issue":
                continue
            index = run.work(name)
            altered += index in run.plants()
            job = run.open_jobs(index)[0]
            validator = run.state.nodes[job.validator]
            sealed = parse(run.judging._seal(validator, run.state.submissions[index], job)).record(Job)
            lease = codec.decode(Lease, sealed.lease)
            opened = batches.read_submission(run.coordinator.files, run.state.submissions[index])
            fixed = dataclasses.replace(lease, lease_id=bytes(16), nonce=bytes(32), tasks=())
            seen = (fixed, len(lease.tasks), sealed.round, len(sealed.lease), opened.engine, shape_of(opened))
            known = run.state.nodes[run.state.submissions[index].owner].accepted > 0
            assert shapes.setdefault(f"known {known}", seen[:-1]) == seen[:-1], name
            assert seen[-1] == {(True, True, True)}
            lengths[name.startswith("phantom")].append(sealed.raw_length / len(opened.rollouts))
            await run.judge_all(index)
            await run.check()
    assert altered and len(lengths[True]) >= 8
    assert abs(np.mean(lengths[True]) - np.mean(lengths[False])) < 3 * np.std(lengths[False]) + 1
    told = {name: story(run, run.identity_of(name).public) for name in names}
    ordinary = told["ann"] | told["bob"] | told["eve"] | {("verdict", "rejected")}
    assert all(told[name] <= ordinary for name in names)
    written = b"".join(codec.encode(stored.entry()) for stored in run.book.ledger.entries())
    assert not any(run.secret_of(period) in written for period in range(4))


def shape_of(opened: Submission) -> set[tuple[bool, bool, bool]]:
    """Whether every rollout has as many log-probabilities as tokens, a chunk for every 32, all of one size."""
    return {
        (
            len(one.logprobs) == len(one.tokens),
            len(one.proofs) == -(-len(one.tokens) // 128),
            len({len(chunk) for chunk in one.proofs}) == 1,
        )
        for one in opened.rollouts
    }


def story(run: PlantedRun, key: bytes) -> set[tuple[str, str]]:
    """Kinds of entries that concern one key."""
    return {
        (entry.event, "")
        for entry in (stored.entry() for stored in run.book.ledger.entries())
        if entry.subject and key in (parse(entry.subject).signer, parse(entry.subject).audience)
    }


# --- whose time is over -----------------------------------------------------------------------------------------------


async def test_a_phantom_gets_no_lease_once_its_secret_is_about_to_be_shown(
    planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on anybody can sign with its key."""
    monkeypatch.setattr(draws, "PERIOD_SUBMISSIONS", 6)
    monkeypatch.setattr(phantoms, "LAST_SUBMISSIONS", 2)
    monkeypatch.setattr(phantoms, "SHARES", (0.0,) * 5)
    run = await planted()
    given: dict[str, list[tuple[int, int]]] = {"phantom 0 4": [], "phantom 1 4": []}
    for _ in range(8):
        for name in ("ann", *given):
            if run.decide(name).kind == "issue":
                if name in given:
                    given[name].append((len(run.state.periods) - 1, run.state.periods[-1].submissions))
                await run.judge_all(run.work(name))
            run.tick()
        await run.close_batch()
    assert run.state.periods[0].secret is not None and len(run.state.periods) > 2
    assert max(given["phantom 0 4"]) < (0, 4) and (0, 4) <= max(given["phantom 1 4"]) < (1, 4)
    answer = run.decide("phantom 0 4")
    assert answer.kind == "leave" and "phantom" in answer.reason
    for name, (period, _) in [("phantom 0 4", (0, 0)), ("phantom 1 4", (1, 0))]:
        assert (
            phantoms.keys(run.state.periods[period].secret or run.secret_of(period))[run.identity_of(name).public] == 4
        )


# --- what follows from a secret ---------------------------------------------------------------------------------------


def test_phantoms_follow_from_a_secret_and_differ() -> None:
    known = [phantoms.keys(draws.period_secret(SECRET, period)) for period in range(4)]
    assert known == [phantoms.keys(draws.period_secret(SECRET, period)) for period in range(4)]
    assert len({key for keys in known for key in keys}) == 4 * phantoms.PER_PERIOD
    assert all(sorted(keys.values()) == list(range(phantoms.PER_PERIOD)) for keys in known)
    text = (Path(__file__).parents[1] / "docs" / "protocol.md").read_text()
    for vector in (phantoms.identity(SECRET, 0).public, draws.keyed(SECRET, "plant", b"\x11" * 16)[:8]):
        assert f"`{vector.hex()}`" in text


def test_each_number_alters_its_share_of_leases() -> None:
    """4096 leases: five standard deviations of a half are 2.5 times less than the step to the next share."""
    for number in range(phantoms.PER_PERIOD):
        share = phantoms.SHARES[number % 5]
        count = sum(phantoms.is_plant(SECRET, number, i.to_bytes(16, "big")) for i in range(4096))
        assert abs(count / 4096 - share) < 5 * (share * (1 - share) / 4096) ** 0.5


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def rig(request: pytest.FixtureRequest):
    if request.param == "fp32":
        return make_rig(load_policy(TINY), make("word"), 2, 4, 9, (1,))
    verifier, sampler = load_to_verify(TINY, "bf16"), load_to_sample(TINY, "bf16").model
    return make_rig(verifier, make("word"), 2, 4, 9, (1,), bf16=measured("tiny"), generator=sampler)


def test_a_plant_is_false_in_one_rollout_and_clearly(rig) -> None:
    """Also under the bounds by which a validator is accused; all that is not altered holds."""
    seen: Counter[str] = Counter()
    for number in range(24):
        lease = dataclasses.replace(rig.lease, lease_id=number.to_bytes(16, "big"))
        spoilt = plants.spoil(SECRET, lease, rig.honest.rollouts, rig.run.manifest)
        differ = [i for i, (a, b) in enumerate(zip(spoilt, rig.honest.rollouts, strict=True)) if a != b]
        assert len(differ) == 1 and spoilt == plants.spoil(SECRET, lease, rig.honest.rollouts, rig.run.manifest)
        (at,) = differ
        ours, theirs = spoilt[at], rig.honest.rollouts[at]
        changed = {name for name in vars(ours) if getattr(ours, name) != getattr(theirs, name)}
        assert len(changed) == 1
        seen.update(changed)
        raw = codec.encode(Submission(lease.lease_id, "test", tuple(spoilt)))
        judged = judge(wider(rig.run), lease, raw, rig.policy, rig.environment)
        assert [i for i, outcome in enumerate(judged.outcomes) if outcome.outcome != ACCEPT] == [at]
        assert judged.outcomes[at].outcome == REJECT
        assert judged.outcomes[at].reason != ReasonCode.TERMINATION, "no model would be needed to tell"
    assert set(seen) == {"tokens", "logprobs", "proofs"} and min(seen.values()) >= 3, seen


def test_chunks_of_rollouts_that_are_alike_are_not_exchanged(rig) -> None:
    """Their states differ by rounding only: such a plant would be true."""
    one = rig.honest.rollouts[0]
    alike = [dataclasses.replace(one, sample=i, proofs=(bytes([i]) + one.proofs[0][1:],)) for i in range(4)]
    empty = [dataclasses.replace(one, tokens=b"", logprobs=b"", proofs=()) for _ in range(4)]
    for number in range(24):
        lease = dataclasses.replace(rig.lease, lease_id=number.to_bytes(16, "big"), tasks=rig.lease.tasks[:1])
        spoilt = plants.spoil(SECRET, lease, alike, rig.run.manifest)
        assert spoilt != alike and [a.proofs for a in spoilt] == [b.proofs for b in alike]
        assert plants.spoil(SECRET, lease, empty, rig.run.manifest) == empty
