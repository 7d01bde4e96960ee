"""An audit in several processes, and one that goes on where it was stopped: the same report as in one go.

The archive is real, and so are the processes; what goes wrong in one is put into the parent before it forks.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import UsageError
from protocol.records import Lease
from tests.archive_builder import build_archive, copy_archive, invert_verdicts
from verifier import blocks, cli, compare, derive, judge, model, workers
from verifier.archive import RunArchive, SubmissionFact
from verifier.audit import Options, audit
from verifier.derive import Begun, Derivation, Part, parts
from verifier.resume import MAGIC, Kept
from verifier.workers import Died, affordable, derive_all, signals_later

ROLLOUTS = 36


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build_archive(tmp_path_factory.mktemp("archive") / "run", leases_per_step=4)


@pytest.fixture
def copy(built, tmp_path):
    return copy_archive(built, tmp_path)


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path, monkeypatch):
    """No process, and no copy of the weights."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    yield
    assert multiprocessing.active_children() == [] and list(scratch.iterdir()) == []


def said(report):
    """All of a report but how it was made."""
    out = report.to_json()
    for name in ("seconds", "rollouts_resumed", "notes"):
        del out[name]
    return out


def in_the_processes(monkeypatch, do):
    """Call `do(index)` before submission `index` is derived, wherever that is."""
    derive_one = derive.Deriver._derive

    def first(self, fact, policy):
        do(fact.index)
        return derive_one(self, fact, policy)

    monkeypatch.setattr(derive.Deriver, "_derive", first)


def order(copy):
    """Submissions in the order in which an audit takes them."""
    facts = RunArchive.open(copy).facts.submissions.values()
    return [fact.index for fact in sorted(facts, key=lambda fact: (fact.lease.epoch, fact.lease.step, fact.index))]


# --- several processes ----------------------------------------------------------------------------------------------


def test_the_report_is_the_same_from_any_number_of_processes(built, copy):
    honest = [said(audit(copy, Options(jobs=jobs))) for jobs in (1, 2, 5)]
    assert honest[0] == honest[1] == honest[2] and honest[0]["rollouts_held"] == ROLLOUTS
    assert honest[0]["failures"] == honest[0]["unchecked"] == []
    invert_verdicts(copy, built.chain.run, built.identities)
    wrong = [said(audit(copy, Options(jobs=jobs))) for jobs in (1, 2, 5)]
    assert wrong[0] == wrong[1] == wrong[2] and wrong[0]["rollouts_held"] == 0
    assert {f"verdict/{index}" for index in built.verdicts} <= {one["record"] for one in wrong[0]["failures"]}


def test_another_machine_decides_the_same(built, copy, monkeypatch):
    """Batches and tiles of another size give other roundings, and the same outcomes and records."""
    one = audit(copy, Options(jobs=1))
    monkeypatch.setattr(model, "_PREFILL_TOKENS", 16)
    monkeypatch.setattr(judge, "_TILE_LOGITS", 64)
    monkeypatch.setattr(blocks, "_CACHED_TOKENS", 16)
    assert said(audit(copy, Options(jobs=2))) == said(one)
    wanted = RunArchive.open(copy).facts.submissions[order(copy)[0]].rollout_id(1)
    numbers = audit(copy, Options(rollout=wanted, jobs=2)).derived[0]
    assert (numbers.outcome, numbers.reason) == ("accept", "holds")


def test_one_rollout_and_a_share_are_drawn_as_in_one_process(copy):
    share = [audit(copy, Options(fraction=0.5, seed="0a0b", jobs=jobs)) for jobs in (1, 3)]
    assert said(share[0]) == said(share[1]) and 0 < share[0].rollouts_checked < ROLLOUTS
    wanted = RunArchive.open(copy).facts.submissions[order(copy)[2]].rollout_id(3)
    assert said(audit(copy, Options(rollout=wanted, jobs=1))) == said(audit(copy, Options(rollout=wanted, jobs=3)))


@pytest.mark.parametrize(
    ("how", "words"),
    [(signal.SIGKILL, "SIGKILL"), (signal.SIGTERM, "SIGTERM"), (3, "exit code 3")],
)
def test_what_a_process_was_at_when_it_ended_could_not_be_checked_and_the_rest_is(copy, monkeypatch, how, words):
    victim = order(copy)[3]

    def end(index):
        if index == victim:
            os.kill(os.getpid(), how) if isinstance(how, signal.Signals) else os._exit(how)

    in_the_processes(monkeypatch, end)
    report = audit(copy, Options(jobs=2))
    ((record, why),) = report.unchecked
    assert record == f"submission/{victim}" and words in why
    assert (report.failures, report.exit_code) == ([], 2)
    assert report.rollouts_checked == report.rollouts_held == ROLLOUTS - 4


def counted_starts(monkeypatch):
    started = []
    new = workers._Worker.__init__
    monkeypatch.setattr(workers._Worker, "__init__", lambda self, *args: (started.append(1), new(self, *args))[1])
    return started


def test_submissions_that_kill_the_process_that_reads_them_cost_themselves_alone(copy, monkeypatch):
    """However many come one after another, in one part or over several."""
    poison = set(order(copy)[: len(order(copy)) - 2])
    assert len(poison) > 2 * workers.MOST_DEATHS
    started = counted_starts(monkeypatch)
    in_the_processes(monkeypatch, lambda index: os.kill(os.getpid(), signal.SIGKILL) if index in poison else None)
    report = audit(copy, Options(jobs=1))
    assert {record for record, _ in report.unchecked} == {f"submission/{index}" for index in poison}
    assert report.rollouts_checked == report.rollouts_held == ROLLOUTS - 4 * len(poison) and report.exit_code == 2
    assert len(started) <= 1 + len(poison)


def test_weights_that_end_every_process_are_given_up_and_so_is_a_machine_that_loads_none(monkeypatch):
    """Each policy is tried again first: memory may be short for a while."""

    def deriving(bad):
        def derive_part(part):
            if part.step in bad:
                os._exit(3)
            for index in part.submissions:
                yield Begun(index)
                yield Derivation(index)

        return derive_part

    todo = [Part(0, step, (10 * step + 1, 10 * step + 2)) for step in range(5) for _ in (0, 1)]

    def run(bad):
        events = list(derive_all(todo, deriving(bad), 1))
        died = [(event.part, event.why) for event in events if isinstance(event, Died)]
        assert all("while they loaded the weights" in why for _, why in died)
        return [part.step for part, _ in died], sum(isinstance(event, Derivation) for event in events)

    with monkeypatch.context() as patch:
        tries = counted_starts(patch)
        assert run({1}) == ([1, 1], 16) and len(tries) == 2 + workers.MOST_DEATHS - 1
    with monkeypatch.context() as patch:
        tries = counted_starts(patch)
        gone, derived = run({0, 1, 2, 3, 4})
        assert sorted(gone) == sorted(part.step for part in todo) and derived == 0
        assert len(tries) == workers.MOST_DEATHS**2


def test_a_process_that_says_nothing_is_stopped():
    def stuck(part):
        for index in part.submissions:
            if index == 2:
                time.sleep(600)
            yield Derivation(index)

    events = list(derive_all([Part(0, 0, (1, 2, 3)), Part(0, 1, (4,))], stuck, 2, silent_s=0.5))
    (died,) = [event for event in events if isinstance(event, Died)]
    assert died.part.submissions == (2,) and "said nothing" in died.why
    assert sorted(event.submission for event in events if isinstance(event, Derivation)) == [1, 3, 4]


def test_whoever_stops_listening_ends_all_processes():
    def endless(part):
        while True:
            yield Derivation(part.submissions[0])

    events = derive_all([Part(0, 0, (1,)), Part(0, 1, (2,))], endless, 2)
    next(events)
    assert len(multiprocessing.active_children()) == 2
    events.close()
    assert multiprocessing.active_children() == []


SCRIPT = """
    import sys, time
    from verifier.derive import Derivation, Part
    from verifier.workers import derive_all

    def endless(part):
        import os
        print(os.getpid(), flush=True)
        time.sleep(600)
        yield Derivation(1)

    list(derive_all([Part(0, 0, (1,)), Part(0, 1, (2,))], endless, 2))
"""


def test_processes_end_with_an_audit_that_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SCRIPT)], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(parent.stdout.readline()) for _ in range(2)]
    finally:
        parent.kill()
        parent.wait()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until, "a process outlived its audit"
        time.sleep(0.02)
    parent.stdout.close()


def test_as_many_processes_as_there_is_memory_for():
    assert affordable(8, 4 << 20, 64 << 10) == 8 and affordable(8, 4 << 20, None) == 8
    assert affordable(8, 270 << 20, 4096) == 2 and affordable(8, 270 << 20, 100) == 1
    assert affordable(8, 0, 3 * 1024) == 2  # compiled loops are counted, too


lengths = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 9)), max_size=8)


@given(lengths, st.integers(1, 9))
def test_property_parts_hold_every_submission_once_in_order_and_one_policy_each(policies, count):
    facts = []
    for epoch, step, many in sorted(policies):
        lease = Lease(bytes(16), bytes(32), epoch, step, bytes(32), bytes(32), bytes(32), (0,), 1, 1, 1, 1)
        facts += [SubmissionFact(len(facts) + i, lease, None, b"") for i in range(many)]
    found = parts(facts, count)
    assert [index for part in found for index in part.submissions] == [fact.index for fact in facts]
    for part in found:
        assert {(facts[i].lease.epoch, facts[i].lease.step) for i in part.submissions} == {(part.epoch, part.step)}
        assert len(part.submissions) <= max(1, -(-len(facts) // (4 * count)))


# --- going on -------------------------------------------------------------------------------------------------------


class Stop:
    """Ctrl-C when so many rollouts are done."""

    def __init__(self, at):
        self.at, self.seen = at, []

    def __call__(self, done, total):
        self.seen.append((done, total))
        if done >= self.at:
            raise KeyboardInterrupt


def interrupted(copy, options, at=16):
    with pytest.raises(KeyboardInterrupt):
        audit(copy, options, Stop(at))


@pytest.fixture
def state(tmp_path):
    return tmp_path / "outside" / "audit.state"


def test_an_interrupted_audit_goes_on_where_it_stopped(built, copy, state):
    invert_verdicts(copy, built.chain.run, built.identities)
    whole = audit(copy, Options(jobs=2))
    options = Options(jobs=2, resume=True, state=state)
    interrupted(copy, options)
    assert state.stat().st_mode & 0o777 == 0o600
    listen = Stop(10**9)
    report = audit(copy, options, listen)
    assert said(report) == said(whole) and report.notes == []
    assert 16 <= report.rollouts_resumed < ROLLOUTS and listen.seen[0] == (report.rollouts_resumed, ROLLOUTS)
    assert f"had derived {report.rollouts_resumed} rollouts" in "\n".join(report.lines())
    assert not state.exists() and list(state.parent.iterdir()) == []
    assert audit(copy, options).rollouts_resumed == 0


def test_ctrl_c_says_that_the_same_command_goes_on(copy, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    added, add = [], Kept.add

    def fifth(self, one):
        add(self, one)
        added.append(one)
        if len(added) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Kept, "add", fifth)
        assert cli.main(["audit", str(copy), "--jobs", "1"]) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert cli.main(["audit", str(copy), "--jobs", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rollouts_resumed"] == 20


def test_a_share_that_was_drawn_by_chance_is_drawn_again_until_it_is_done(copy, state):
    options = Options(fraction=0.8, jobs=1, resume=True, state=state)
    interrupted(copy, options, at=4)
    seed = json.loads(state.read_bytes()[len(MAGIC) :].partition(b"\n")[2])["seed"]
    again, fresh = audit(copy, options), audit(copy, options)
    assert again.rollouts_resumed >= 4 and again.seed == seed != fresh.seed


def test_the_state_is_in_the_users_cache_when_nobody_says_where(copy, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    interrupted(copy, Options(jobs=1, resume=True))
    (path,) = (tmp_path / "cache" / "headwater" / "audits").iterdir()
    assert audit(copy, Options(jobs=1, resume=True)).rollouts_resumed >= 16 and not path.exists()


def test_what_another_audit_kept_is_left_aside_with_a_sentence(built, copy, state, monkeypatch):
    options = Options(jobs=1, resume=True, state=state)
    interrupted(copy, options)
    kept = state.read_bytes()

    def left_aside(words, options=options):
        report = audit(copy, options)
        (note,) = report.notes
        assert report.rollouts_resumed == 0 and report.rollouts_checked and words in note and str(state) in note
        assert f"NOTE  {note}" in report.lines()

    left_aside("another audit", Options(fraction=0.9, seed="00", jobs=1, resume=True, state=state))
    state.write_bytes(kept)
    with monkeypatch.context() as patch:
        patch.setattr("verifier.resume.software", lambda: "the next release")
        left_aside("another audit")
    for damaged in (
        kept[:-1],
        kept[: len(kept) // 2],
        kept[:-20] + b"x" + kept[-19:],
        kept + b"\n",
        kept[: len(MAGIC)],
    ):
        state.write_bytes(damaged)
        left_aside("damaged")
    state.write_bytes(kept)
    invert_verdicts(copy, built.chain.run, built.identities)  # the same run, and another ledger
    left_aside("another audit")


def test_every_flipped_byte_of_a_state_is_noticed(copy, state):
    options = Options(jobs=1, resume=True, state=state)
    interrupted(copy, options)
    kept = state.read_bytes()
    for at in range(len(MAGIC), len(kept), 97):
        state.write_bytes(kept[:at] + bytes([kept[at] ^ 1]) + kept[at + 1 :])
        report = audit(copy, Options(fraction=1.0, jobs=1, resume=True, state=state))
        assert report.rollouts_resumed == 0 and report.notes


@pytest.mark.parametrize(
    "text",
    [
        "[[]]",
        "[]",
        "null",
        '{"key": KEY, "seed": "zz", "derivations": []}',
        '{"key": KEY, "seed": "", "derivations": [[]]}',
        '{"key": KEY, "seed": "", "derivations": [{"submission": Infinity}]}',
        '{"key": KEY, "seed": "", "derivations": [{"submission": 1, "decided_here": []}]}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:24],
)
def test_a_whole_state_of_another_shape_is_left_aside(copy, state, text):
    options = Options(jobs=1, resume=True, state=state)
    interrupted(copy, options)
    key = json.loads(state.read_bytes().splitlines()[2])["key"]
    raw = text.replace("KEY", json.dumps(key)).encode()
    state.write_bytes(MAGIC + blake3(raw).hexdigest().encode() + b"\n" + raw)
    report = audit(copy, options)
    assert report.exit_code == 0 and report.rollouts_resumed == 0 and report.rollouts_checked == ROLLOUTS
    assert "left aside" in report.notes[0]


def test_a_kept_derivation_that_says_too_little_or_too_much_is_made_again(copy, state):
    options = Options(jobs=1, resume=True, state=state)
    for change in (
        lambda one: one.update(known=one["known"][1:]),
        lambda one: one.update(known=[*one["known"], 99]),
        lambda one: one.update(known=[one["known"][0]] * len(one["known"])),
        lambda one: one.update(wrong=[{"verdict": 10**9, "positions": [0], "message": "", "numbers": {}}]),
    ):
        interrupted(copy, options)
        told = json.loads(state.read_bytes().splitlines()[2])
        others = sum(len(one["known"]) for one in told["derivations"][1:])
        change(told["derivations"][0])
        raw = json.dumps(told).encode()
        state.write_bytes(MAGIC + blake3(raw).hexdigest().encode() + b"\n" + raw)
        report = audit(copy, options)
        assert (report.exit_code, report.rollouts_checked, report.rollouts_resumed) == (0, ROLLOUTS, others)


def test_what_was_derived_while_a_verdicts_details_were_away_is_not_kept(copy, state, monkeypatch):
    options = Options(jobs=1, resume=True, state=state)
    fact = next(iter(RunArchive.open(copy).facts.verdicts.values()))
    path = copy / fact.file
    raw = path.read_bytes()
    path.unlink()
    interrupted(copy, options, at=ROLLOUTS)
    path.write_bytes(raw)
    other = lambda self, positions: [compare.Difference(i, "reward", 1.0, "differ") for i in positions]  # noqa: E731
    monkeypatch.setattr(compare.Held, "differences", other)
    report = audit(copy, options)
    assert fact.record in {failure.record for failure in report.failures}, "it was compared at last"


def test_what_was_derived_from_a_file_that_is_damaged_since_counts_no_more(copy, state):
    options = Options(jobs=1, resume=True, state=state)
    interrupted(copy, options, at=ROLLOUTS)
    path = next(iter(sorted(copy.glob("submissions/*.hws"))))
    path.write_bytes(path.read_bytes()[:-1])
    report = audit(copy, options)
    assert report.exit_code == 1 and report.rollouts_checked == report.rollouts_resumed == ROLLOUTS - 4
    interrupted(copy, options, at=ROLLOUTS)
    shard = copy / "published" / "e0000-s00000001" / "shard-000000.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    report = audit(copy, options)
    assert report.rollouts_checked == report.rollouts_resumed == 16


def test_what_could_not_be_derived_is_tried_again(copy, state, monkeypatch):
    options = Options(jobs=1, resume=True, state=state)
    victim = order(copy)[0]
    with monkeypatch.context() as patch:
        in_the_processes(patch, lambda index: os.kill(os.getpid(), signal.SIGKILL) if index == victim else None)
        assert audit(copy, options).exit_code == 2 and state.exists()
    report = audit(copy, options)
    assert (report.exit_code, report.rollouts_resumed, report.rollouts_checked) == (0, ROLLOUTS - 4, ROLLOUTS)
    assert not state.exists()


def test_a_place_that_is_none_is_refused_before_anything_is_written(copy, tmp_path, monkeypatch):
    mine = tmp_path / "thesis.txt"
    mine.write_text("years of work")
    for place, words in ((mine, "no state of an audit"), (copy / "state.hw", "lies in the archive"),
                         (mine / "x", "can't keep"), (tmp_path, "can't keep")):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            audit(copy, Options(resume=True, state=place))
    assert mine.read_text() == "years of work" and not (copy / "state.hw").exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(mine))
    report = audit(copy, Options(resume=True))
    assert report.exit_code == 0 and "begins anew" in report.notes[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_fork_is_heard_after_it(number):
    """Python drops what is raised in its hooks around a fork: an audit that was told to stop there went on."""

    class StopError(Exception):
        pass

    def leave(number, frame):
        raise StopError

    before = signal.signal(number, leave)
    try:
        went_on = False
        with pytest.raises(StopError), signals_later():
            signal.raise_signal(number)
            went_on = True
        assert went_on and signal.getsignal(number) is leave
    finally:
        signal.signal(number, before)
