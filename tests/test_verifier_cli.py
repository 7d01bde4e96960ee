"""`verifier` as people and programs meet it: help without heavy imports, explanations, the ledger in words."""

import json
import subprocess
import sys

import pytest

from protocol.errors import ReasonCode
from protocol.identity import Identity
from protocol.ledger import Ledger
from protocol.segments import seal_missing
from protocol.sequences import Sequences
from tests.ledger_builder import START_MS, Chain, identity
from verifier import cli
from verifier.explain import EXPLANATIONS, explain


@pytest.fixture
def run_dir(tmp_path):
    """A run directory with a ledger and nothing else."""
    chain = Chain()
    (tmp_path / "manifest.hw").write_bytes(chain.run.envelope.raw)
    ledger = Ledger.open(
        tmp_path / "state" / "ledger.db",
        run=chain.run_id,
        coordinator=identity("coordinator"),
        sequences=Sequences(tmp_path / "state" / "sequences.json"),
        clock_ms=lambda: START_MS,
    )
    chain.sink = ledger
    chain.open()
    chain.join("val", "validator")
    chain.join("ann", "inference")
    chain.policy(0)
    lease = chain.lease("ann")
    number = chain.submit(lease)
    chain.verdict(chain.job(number, "val"), chain.digest_of(lease), "val", [0, 0, 1, 2])
    chain.close_lease(lease)
    chain.batch(0, [(number, 9, 0)])
    chain.append("grant", b"\xff")
    chain.finish(1)
    ledger.append_many([])
    seal_missing(ledger, tmp_path / "ledger")
    ledger.close()
    return tmp_path


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from verifier import cli\n"
        "for argv in (['--help'], ['audit', '--help'], ['calibrate', '--help'], ['explain', 'holds']):\n"
        "    try:\n"
        "        cli.main(argv)\n"
        "    except SystemExit:\n"
        "        pass\n"
        "heavy = {'torch', 'transformers', 'libp2p', 'numpy', 'trio'} & set(sys.modules)\n"
        "sys.stderr.write(repr(sorted(heavy)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "[]"
    assert "example: verifier audit" in done.stdout


def test_every_reason_code_is_explained_in_full_sentences():
    assert set(EXPLANATIONS) == set(ReasonCode)
    for code, item in EXPLANATIONS.items():
        for text in (item.meaning, item.evidence, item.action):
            assert len(text) > 20 and text.strip().endswith("."), code


def test_explain_prints_meaning_evidence_and_advice(capsys):
    assert cli.main(["explain", "token-not-forced"]) == 0
    out = capsys.readouterr().out
    assert "What it means" in out and "Why it counts" in out and "What to do" in out and "seed" in out
    assert cli.main(["explain", "reward-mismatch", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["meaning"] == explain("reward-mismatch").meaning
    assert cli.main(["explain"]) == 0
    listed = capsys.readouterr().out
    assert all(code.value in listed for code in ReasonCode)
    assert cli.main(["explain", "token-not-force"]) == 2
    assert "did you mean token-range, token-not-forced?" in capsys.readouterr().err


def test_the_ledger_is_listed_in_words(run_dir, capsys):
    assert cli.main(["ledger", str(run_dir)]) == 1, "the last grant does not decode"
    out = capsys.readouterr().out
    for text in (
        "joins as inference 'ann'",
        "2 x 2 rollouts, step 0",
        "2 accepted, 1 rejected, 1 inconclusive (format)",
    ):
        assert text in out
    assert "does not decode" in out and "after 1 step:" in out
    assert cli.main(["ledger", str(run_dir / "ledger"), "--json", "--event", "verdict"]) == 1
    listed = json.loads(capsys.readouterr().out)
    assert [row["event"] for row in listed["entries"]] == ["verdict"]
    assert listed["entries"][0]["signer"] == Identity.from_seed(identity("val").private_seed()).peer_id


def test_a_run_that_has_not_started_is_not_checked_by_ledger_and_audit_alike(tmp_path, capsys):
    (tmp_path / "manifest.hw").write_bytes(Chain().run.envelope.raw)
    for command in ("ledger", "audit"):
        assert cli.main([command, str(tmp_path)]) == 2
        shown = "".join(capsys.readouterr())
        assert "NOT CHECKED    ledger: nothing to check yet: the run has not started" in shown
        assert "DOES NOT HOLD" not in shown
        assert cli.main([command, str(tmp_path), "--json"]) == 2
        assert [item["record"] for item in json.loads(capsys.readouterr().out)["unchecked"]] == ["ledger"]


def test_an_event_that_does_not_exist_is_named_beside_those_that_do(run_dir, capsys):
    assert cli.main(["ledger", str(run_dir), "--event", "nosuch"]) == 2
    told = capsys.readouterr().err
    assert "--event nosuch: there is no such event" in told and "lease.closed" in told and "run.opened" in told
    assert cli.main(["ledger", str(run_dir), "--event", "tie.lapsed"]) == 1, "none here, and the last grant is broken"
    assert capsys.readouterr().out == ""


def test_a_share_that_is_none_is_explained(run_dir, capsys):
    with pytest.raises(SystemExit):
        cli.main(["audit", str(run_dir), "--fraction", "x"])
    assert "'x' is no share: give a number above 0" in capsys.readouterr().err


def test_usage_mistakes_exit_2_with_the_cause(run_dir, tmp_path, capsys):
    assert cli.main(["ledger", str(tmp_path / "state")]) == 2
    assert "no run directory" in capsys.readouterr().err
    assert cli.main(["ledger", str(tmp_path / "state"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "usage"
    assert cli.main([]) == 2
    for argv in (["audit", str(run_dir), "--fraction", "2"], ["audit", str(run_dir), "--seed", "xyz"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(argv)
        assert caught.value.code == 2
    (run_dir / "manifest.hw").write_bytes(b"broken")
    assert cli.main(["ledger", str(run_dir)]) == 2
    assert "manifest does not hold" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("proof-mismatch", ("stale weights", "quantised", "garbage")),
        ("token-not-forced", ("greedy", "another temperature", "best of several", "one edited token")),
        ("wrong-task", ("easier tasks",)),
        ("reward-mismatch", ("made up",)),
        ("dropped-results", ("kept back", "one in ten million")),
        ("relay-lied", ("signed", "Both signatures are in the ledger")),
        ("quota", ("unverified",)),
        ("draw-wrong", ("secret",)),
    ],
)
def test_explain_says_what_each_reason_catches(reason, words, capsys):
    assert cli.main(["explain", reason]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(word in out for word in words), out
