"""The screen: it fits every terminal, cuts no column, and says who does what, who waits for whom, who was caught."""

from __future__ import annotations

import re
from typing import Any

import pytest
from rich.cells import cell_len

from protocol.commands import several
from trainer.headline import curve, doing, waits
from trainer.picture import Picture, Process
from trainer.roster import Row, rows, tree
from trainer.screen import columns, screen
from trainer.spans import fit, length, plain, size, wrapped

NOW = 1000.0
WHY = {
    "quantised": "proof-mismatch", "small-model": "token-not-forced", "reward": "reward-mismatch",
    "replay": "proof-mismatch", "stale": "proof-mismatch", "greedy": "token-not-forced",
    "easy-tasks": "wrong-task", "best-of-n": "token-not-forced", "edit": "token-not-forced",
    "temperature": "token-not-forced", "dropper": "dropped-results", "garbage": "proof-mismatch",
}  # fmt: skip


def key(name: str) -> str:
    return name.encode().hex()


def node(name: str, role: str = "inference", state: str = "active", **more: Any) -> dict[str, Any]:
    return {"key": key(name), "name": name, "role": role, "state": state, "accepted": 1234, "rejected": 0,
            "inconclusive": 0, "reason": "", "step": 17, "last_seen_s": 0.5, "activity": "generating 32 rollouts",
            "done": 9, "waits_for": "", "parent": "", "bytes_up": 812_000} | more  # fmt: skip


def picture(honest: int = 3, steps: int = 60, cheats: int = 3, **status: Any) -> Picture:
    kinds = dict(list(WHY.items())[:cheats])
    nodes = [node("relay-1", "relay", "probation", parent="origin", activity="relaying")]
    nodes += [node("relay-2", "relay", "probation", parent=key("relay-1"), activity="relaying")]
    nodes += [node(f"node-{i}", parent=key("relay-2")) for i in range(honest)]
    nodes += [node(n, state="suspended", reason=r, accepted=0, rejected=4) for n, r in kinds.items()]
    nodes += [node(f"validator-{i}", "validator", "probation", parent=key("relay-2")) for i in (1, 2)]
    said = "is suspended: a second validator, drawn independently, also found that the run's model did not compute them"
    events = [{"time": 920.0 + i, "text": f"{n} {said} ({r})"} for i, (n, r) in enumerate(kinds.items())]
    whole = {"nodes": nodes, "rollouts": {"accepted": 3702, "rejected": 12, "pending": 64}, "recent_events": events,
             "phase": "running", "run": "ab" * 32, "time": NOW, "step": steps, "steps": 150, "heartbeat_s": 2.0,
             "batches": steps, "leases_open": 3,
             "waits_for": f"96 of 128 rollouts for batch {steps}; 32 with validator-1, validator-2"}  # fmt: skip
    rows = [{"event": "step", "step": i, "reward_mean": i / 60, "time": NOW - steps + i} for i in range(steps)]
    return Picture(
        "headwater demo: tiny", 88.0, 150, 7 + honest, NOW - 88, {**whole, **status}, rows, None,
        frozenset(map(key, kinds)), [], now=NOW, learner_alive=True, origin_alive=True, sent={"origin": 406_000_000},
        run_dir="runs/demo",
    )  # fmt: skip


def text_of(shown: Picture, width: int = 80, height: int | None = 24) -> str:
    return "\n".join(plain(line) for line in screen(shown, width, height))


SIZES = [(40, 12), (60, 20), (72, 24), (80, 24), (80, 40), (100, 30), (140, 45), (200, 60)]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("honest", [3, 64])
@pytest.mark.parametrize("cheats", [0, 3, 12])
def test_the_screen_fits_the_terminal_and_cuts_no_word(width: int, height: int, honest: int, cheats: int) -> None:
    shown = picture(honest, cheats=cheats)
    lines = screen(shown, width, height)
    assert len(lines) <= height
    assert max(cell_len(plain(line)) for line in lines) <= width
    text = "\n".join(map(plain, lines))
    assert "…" not in text
    assert "headwater demo: tiny" in text and "step 60/150" in text and "0." in text
    known = set(re.findall(r"[\w-]+", text_of(shown, 400, None)))
    for word in re.findall(r"[\w-]+", text):
        assert word in known or word.isdigit() or word in _SHORT, f"{word!r} is cut or new"


_SHORT = {"caught", "reject", "more", "sampling", "checking", "learning", "learns", "waits", "serves", "leases", "to",
          "check", "silent", "d", "does", "and", "processes", "alive", "accepted", "highest", "generating"}  # fmt: skip


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (140, 45)])
def test_each_dishonest_node_is_named_with_its_reason_however_many_there_are(width: int, height: int) -> None:
    text = text_of(picture(cheats=12), width, height)
    for name, reason in WHY.items():
        assert any(name in line and reason in line for line in text.splitlines()), name
    assert "12 of 12 dishonest nodes caught" in text
    for other in ("coordinator", "learner", "origin", "relay-2", "validator-1"):
        assert other in text, other


def test_a_fate_is_told_in_words_where_there_is_room() -> None:
    fates = text_of(picture(), 140, 45)
    assert "caught: 4 of 4 rollouts rejected; the lease's seed forces other tokens (token-not-forced)" in fates
    assert "caught: 4 of 4, token-not-forced" in text_of(picture(), 80, 24)


@pytest.mark.parametrize(
    ("node_now", "words"),
    [
        (node("x", state="probation", accepted=0), "joined; no rollouts of it yet"),
        (node("x", state="probation", accepted=0, waits_for="its first verdict"), "first rollouts are being checked"),
        (node("x", accepted=9), "9 of 9 accepted, not caught so far"),
        (node("x", state="paused", rejected=3, reason="edit"), "3 rejected (edit); no leases until a second validator"),
        (node("x", state="suspended", rejected=3, accepted=1, reason="odd"), "caught: 3 of 4 rollouts rejected; odd"),
        (node("x", state="suspended", reason="dropped-results"), "caught: the leases it gave up held worse results"),
    ],
)
def test_the_fate_follows_what_happens_to_it(node_now: dict[str, Any], words: str) -> None:
    shown = picture(cheats=0, nodes=[node_now])
    shown.dishonest = frozenset([key("x")])
    assert words in text_of(shown, 140, 45)


def test_those_who_join_later_are_announced() -> None:
    shown = picture(cheats=1)
    shown.kinds = frozenset({"quantised", "garbage"})
    text = text_of(shown)
    assert "1 of 2 dishonest nodes caught" in text and "garbage    joins later, when another has left" in text


def test_the_tree_shows_who_pulls_from_whom_in_the_order_of_names() -> None:
    lines = text_of(picture(11, cheats=0), 80, None).splitlines()
    drawn = [line[2:18].rstrip() for line in lines[lines.index(next(x for x in lines if "origin" in x)) :]][:15]
    assert drawn == [
        "origin", "└ relay-1", "  └ relay-2", *[f"    ├ node-{i}" for i in range(11)], "    ├ validator-"
    ]  # fmt: skip


def test_a_ring_of_parents_does_not_hide_anybody() -> None:
    ring = [node("a", "relay", parent=key("b")), node("b", "relay", parent=key("a")), node("c", parent=key("c"))]
    listed = [row.name for row in tree(rows(picture(nodes=ring)))]
    assert sorted(listed) == ["a", "b", "c", "coordinator", "learner", "origin"]


def test_narrow_terminals_lose_whole_columns_in_order() -> None:
    found = rows(picture())
    seen = [len(columns(found, width).shown) for width in range(30, 141)]
    assert seen == sorted(seen) and seen[0] == 0 and seen[-1] == 5
    for width in range(30, 141):
        layout = columns(found, width)
        names = [name for name, _, _ in layout.shown]
        assert names == ["state", "step", "accepted", "rejected", "sent"][: len(names)] or "step" not in names
        assert layout.doing >= 20 or not names


def test_many_nodes_are_counted_but_those_in_trouble_stay() -> None:
    shown = picture(64, cheats=0)
    nodes = shown.status["nodes"]
    trouble = next(n for n in nodes if n["name"] == "node-40")
    trouble |= {"state": "paused", "waits_for": "a second verdict", "activity": "waiting for a lease"}
    next(n for n in nodes if n["name"] == "node-50")["last_seen_s"] = 70.0
    text = text_of(shown)
    assert any("node-40" in line and "waits: verdict" in line for line in text.splitlines())
    assert any("node-50" in line and "quiet" in line and "1:10" in line for line in text.splitlines())
    assert "node-63" not in text
    found = re.search(r"and (\d+) more: (\d+) alive, (\d+) rollouts accepted", text)
    assert found is not None
    listed = [line for line in text.splitlines() if line[0] in "●○"]
    assert len(listed) + int(found[1]) == len(rows(shown))
    assert int(found[2]) == int(found[1]) and int(found[3]) == 1234 * int(found[1]), "nodes that are well"


# --- health -------------------------------------------------------------------------------------------------------


def row(shown: Picture, name: str) -> Row:
    return next(found for found in rows(shown) if found.name == name)


def test_health_of_members_is_told_apart() -> None:
    shown = picture(cheats=0)
    assert row(shown, "node-0").health == "alive"
    nodes = shown.status["nodes"]
    nodes[2]["last_seen_s"] = 6.1  # three heartbeats of 2 s and a little
    assert row(shown, "node-0").health == "quiet" and "nothing heard for 6 s" in row(shown, "node-0").doing[0]
    nodes[2]["last_seen_s"] = None
    assert "since the coordinator started" in row(shown, "node-0").doing[0]
    shown.processes = {"node-0": Process("inference", NOW - 9, -9), "node-1": Process("inference", NOW - 9, 0)}
    assert row(shown, "node-0").health == "gone" and "killed by signal 9" in row(shown, "node-0").doing[0]
    assert row(shown, "node-1").health == "left"


def test_a_silent_coordinator_is_named_and_nobody_else_is_vouched_for() -> None:
    shown = picture()
    shown.now = NOW + 12
    assert row(shown, "coordinator").health == "quiet" and "12 s" in row(shown, "coordinator").doing[0]
    assert row(shown, "node-0").health == "unknown"
    text = text_of(shown)
    assert "the coordinator has been silent for 12 s" in text
    assert "bring it back with: trainer serve runs/demo/run.toml" in text


def test_a_stopped_run_says_how_it_goes_on_and_a_finished_one_that_it_is_over() -> None:
    stopped = picture(phase="stopped")
    stopped.now, stopped.learner_alive, stopped.origin_alive = NOW + 300, False, None
    assert "stopped 5:00 ago at step 60 of 150; trainer serve runs/demo/run.toml goes on" in text_of(stopped, 100, 30)
    assert {found.health for found in rows(stopped)} == {"off"}
    finished = picture(steps=150, phase="finished")
    assert "finished: every step is done and the ledger is sealed" in text_of(finished)
    assert row(finished, "learner").health == "left" and "waits for " not in text_of(finished).replace(
        "or waits for", ""
    )


def test_a_learner_or_origin_that_died_is_shown_with_its_command() -> None:
    shown = picture()
    shown.learner_alive = shown.origin_alive = False
    assert "trainer learn runs/demo/run.toml" in row(shown, "learner").doing[0]
    assert "shardcast publish runs/demo" in row(shown, "origin").doing[0]
    assert row(shown, "learner").health == row(shown, "origin").health == "gone"


def test_one_thing_is_not_called_several() -> None:
    shown = picture(leases_open=1, rollouts={"accepted": 1, "rejected": 0, "pending": 1})
    assert row(shown, "coordinator").doing[:2] == ("1 lease out, 1 rollout to be checked", "1 lease, 1 to check")
    assert (several(0, "lease"), several(1, "lease"), several(2, "lease")) == ("0 leases", "1 lease", "2 leases")


def test_the_learner_learns_or_waits() -> None:
    assert row(picture(batches=61), "learner").doing[0] == "learns from batch 60"
    assert row(picture(batches=60), "learner").doing[0] == "waits for batch 60"


def test_bytes_down_count_every_relay_and_bytes_up_every_node() -> None:
    shown = picture(cheats=0)
    shown.sent = {"origin": 400_000_000, "relay-1": 800_000_000}  # its own count where it is known
    shown.status["nodes"][0] |= {"bytes_sent": 1}
    shown.status["nodes"][1] |= {"bytes_sent": 2_000_000_000}
    assert "sent: weights 3.2 GB, rollouts 2.4 MB" in text_of(shown, 100, 30)


def test_a_validator_that_is_behind_says_by_how_much() -> None:
    busy = node("v", "validator", activity="judging 32 rollouts", open_jobs=4, verdict_s=1.25)
    assert row(picture(nodes=[busy]), "v").doing[0] == "judging 32 rollouts; 3 more to do, 1.2 s each"
    assert row(picture(nodes=[busy | {"open_jobs": 1}]), "v").doing[0] == "judging 32 rollouts"


# --- what happens, and what is waited for -------------------------------------------------------------------------


def starting(joined: int) -> Picture:
    names = [("coordinator", "coordinator"), ("learner", "learner"), ("origin", "origin"), ("relay-1", "relay"),
             ("validator-1", "validator"), ("node-0", "inference"), ("greedy-engine", "engine"),
             ("greedy", "inference")]  # fmt: skip
    processes = {name: Process(role, NOW - 21) for name, role in names}
    nodes = [node(name, role, "probation") for name, role in names if role in ("relay", "inference", "validator")]
    status = {"nodes": nodes[:joined], "phase": "starting", "time": NOW, "steps": 150} if joined else {}
    return Picture("headwater demo: tiny", 21.0, 150, 4, NOW - 21, status, kinds=frozenset({"greedy"}), now=NOW,
                   processes=processes)  # fmt: skip


def test_the_start_shows_which_processes_load_and_since_when() -> None:
    nothing = text_of(starting(0))
    assert "joined 0 of 4" in nothing and "loads libraries, 21 s" in nothing
    assert "waits for  coordinator, learner, origin and 4 more to load" in nothing, "engines belong to their nodes"
    some = text_of(starting(2))
    assert "joined 2 of 4" in some and "now        starting: 2 of 4 machines have joined" in some
    assert [line for line in some.splitlines() if "validator-1" in line and "alive" in line]
    assert [line for line in some.splitlines() if "node-0" in line and "loading" in line]
    broken = starting(2)
    broken.processes = {**broken.processes, "greedy-engine": Process("engine", NOW - 21, 1)}
    assert "greedy  its engine has ended (exit code 1)" in text_of(broken)


def test_it_says_what_happens_in_every_phase() -> None:
    seen = starting(4)
    seen.status = {**seen.status, "phase": "waiting for weights"}
    told = [doing(seen)[0]]
    seen.sft = {"step": 45, "steps": 200, "loss": 0.38, "done": False}
    told.append(doing(seen)[0])
    assert "stage one 45/200" in text_of(seen) and "loss 0.380" in text_of(seen)
    seen.sft["done"] = True
    told.append(doing(seen)[0])
    seen.status = {**seen.status, "phase": "running", "rollouts": {"pending": 4}}
    told.append(doing(seen)[0])
    seen.rows = [{"step": 0}]
    told.append(doing(seen)[0])
    seen.status = {**seen.status, "phase": "draining"}
    told.append(doing(seen)[0])
    for words, sentence in zip(
        ("all machines have joined", "stage one", "weights go out", "being checked", "the learner learns",
         "the last verdicts"), told, strict=True,
    ):  # fmt: skip
        assert words in sentence
    assert doing(Picture("run x", run_dir="x"))[0] == "nothing runs here yet; start it with: trainer serve x/run.toml"


def test_what_is_waited_for_is_shortened_by_whole_facts() -> None:
    shown = picture()
    assert waits(shown) == (
        "96 of 128 rollouts for batch 60; 32 with validator-1, validator-2", "96 of 128 rollouts for batch 60",
        "96 of 128 rollouts",
    )  # fmt: skip
    assert "waits for  96 of 128 rollouts for batch 60\n" in text_of(shown, 60, 24)


PHASES = [
    {},
    {"waits_for": "0 of 1024 rollouts for batch 12345; no node holds a lease"},
    {"waits_for": "the first weights: the learner makes them, the origin publishes them", "step": 0},
    {"waits_for": "the learner and the origin: the weights of step 12345"},
    {"waits_for": "the last verdicts: 3 submissions, with validator-1, validator-2", "phase": "draining"},
    {"phase": "stopped"},
    {"phase": "finished"},
    {"time": NOW - 8000},
    {"rollouts": {"accepted": 12345678, "rejected": 1234, "pending": 64}},
]
MEMBERS = ["rollouts to check", "its first verdict", "a second verdict", "next weights", "the first weights", "a lease",
           "a validator"]  # fmt: skip


@pytest.mark.parametrize("status", PHASES, ids=lambda status: " ".join(map(str, status.values()))[:30])
@pytest.mark.parametrize("rows", [True, False])
def test_at_every_width_each_line_is_a_whole_phrase(status: dict[str, Any], rows: bool) -> None:
    shown = picture(**status)
    nodes = list(shown.status["nodes"])
    nodes += [node(f"n-{i}", activity="waiting for a lease", waits_for=words) for i, words in enumerate(MEMBERS)]
    nodes += [node("validator-3", "validator", activity="starting", waits_for="rollouts to check"),
              node("n-20", last_seen_s=7300.0), node("n-21", last_seen_s=None), node("n-22", state="paused"),
              node("validator-4", "validator", outvoted=3), node("validator-5", "validator", open_jobs=3,
              activity="judging 32 rollouts", verdict_s=0.5)]  # fmt: skip
    shown.status = {**shown.status, "nodes": nodes, "leases_open": 1}
    shown.rows = shown.rows if rows else []
    shown.processes = {"late": Process("inference", NOW - 7300), "lost": Process("relay", NOW - 50, -9)}
    shown.members = 40
    for width in range(40, 121):
        text = text_of(shown, width, None)
        assert "…" not in text, (width, [line for line in text.splitlines() if "…" in line])
        assert max(map(cell_len, text.splitlines())) <= width
        idle = [line for line in text.splitlines() if line.endswith(("rollouts to check", "verdict", "weights"))]
        assert all("waits" in line or "makes" in line for line in idle), "what it waits for is not what it has"
    if not status and rows:
        assert "waits for  96 of 128 rollouts\n" in text_of(shown, 40, None)
        assert "waits: rollouts\n" in text_of(shown, 40, None) and "waits: verdict\n" in text_of(shown, 40, None)


def test_time_left_follows_the_last_steps_and_the_wait_for_the_next() -> None:
    shown = picture()
    assert shown.seconds_left == pytest.approx(90 * 1.0)
    shown.now = NOW + 30  # a step took a second so far; this one has taken 31
    assert shown.seconds_left == pytest.approx(60.0)
    shown.rows = shown.rows[:2]
    assert shown.seconds_left is None and "left" not in text_of(shown, 140, 45).splitlines()[0]


def test_the_curve_runs_from_left_to_right_and_bottom_to_top_and_grows_with_the_run() -> None:
    assert curve([], 4, 2) == ["    ", "    "]
    assert curve([0.0, 0.5, 1.0], 5, 2) == ["  █  ", " ██  "]
    assert curve([1.0, 1.0], 8, 1, total=4) == ["████    "]
    lines = curve([i / 299 for i in range(300)], 60, 5)
    assert all(len(line) == 60 for line in lines)
    heights = [sum(line[column] != " " for line in lines) for column in range(60)]
    assert heights == sorted(heights) and heights[0] <= 1 and heights[-1] == 5


def test_on_a_small_terminal_those_who_are_out_are_named_and_those_at_large_told_about() -> None:
    shown = picture(cheats=12)
    shown.status["nodes"][-3] |= {"state": "active", "accepted": 9, "rejected": 0}  # garbage
    text = text_of(shown, 60, 20)
    assert "11 of 12 dishonest nodes caught" in text and "garbage  9 of 9 accepted, not caught so far" in text
    assert all(name in text for name in WHY) and "coordinator" in text and "learner" in text
    assert "token-not-forced" not in text


def test_the_same_news_again_and_again_take_one_line() -> None:
    shown = picture(cheats=0)
    same = [{"time": 950.0 + i, "text": "node-0 gave up a lease"} for i in range(6)]
    shown.status["recent_events"][:] = [*same, {"time": 940.0, "text": "node-0 joined"}]
    lines = text_of(shown).splitlines()
    assert lines[-1] == "  43 s  node-0 gave up a lease (6 times)" and lines[-2] == "  28 s  node-0 joined"


def test_nobody_is_called_quiet_right_after_the_coordinator_started() -> None:
    shown = picture(cheats=0, began=NOW - 5)
    shown.status["nodes"][2]["last_seen_s"] = None
    assert row(shown, "node-0").health == "loading"
    shown.status = {**shown.status, "began": NOW - 60}
    assert row(shown, "node-0").health == "quiet"


def test_the_newest_news_is_whole_and_stamped() -> None:
    lines = text_of(picture(), 80, 26).splitlines()
    assert any(line.startswith("  10 s  reward is suspended") for line in lines)
    assert lines[-1].endswith("(reward-mismatch)")
    shown = picture()
    shown.began = 0.0  # another process's run: the time of day
    assert any(line[2:6:3] == "::" and "reward is suspended" in line for line in
               text_of(shown, 140, 45).splitlines())  # fmt: skip


# --- words and cells ----------------------------------------------------------------------------------------------


def test_sizes_and_lengths_are_short() -> None:
    assert [size(n) for n in (None, 0, 999, 1_000, 9_949_000, 9_960_000, 812_000_000, 1_240_000_000)] == [
        "", "0 B", "999 B", "1 kB", "9.9 MB", "10 MB", "812 MB", "1.2 GB"
    ]  # fmt: skip
    assert all(len(size(10**exponent - 1)) <= 6 for exponent in range(15))
    assert [length(s) for s in (-3, 59.9, 60, 3599, 3600, 86_461)] == [
        "0 s",
        "59 s",
        "1:00",
        "59:59",
        "1:00:00",
        "24:01:01",
    ]


def test_words_are_never_cut() -> None:
    assert fit(("a long one", "short"), 6) == "short"
    assert fit(("a long one",), 6) == "a lon…", "what is not whole says so"
    assert wrapped("one two three", 7) == ["one two", "three"]
    assert wrapped("漢字漢字漢字", 5) == ["漢字", "漢字", "漢字"]


def test_a_strangers_long_wide_name_stays_in_its_column() -> None:
    shown = picture(nodes=[node("漢" * 40), node("x")])
    lines = [plain(line) for line in screen(shown, 80, 24)]
    assert max(map(cell_len, lines)) <= 80
    (cut,) = [line for line in lines if "漢" in line]
    (other,) = [line for line in lines if "├ x" in line or "└ x" in line]
    assert cell_len(cut[: cut.index("active")]) == cell_len(other[: other.index("active")])
