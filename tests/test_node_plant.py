"""`node plant`: who works next, what a phantom sends, and a whole run with phantoms in it."""

from __future__ import annotations

import dataclasses
import json
import re
import stat
import subprocess
from pathlib import Path

import pytest
import tokenizers

from environments.registry import make
from node.inference import Work
from node.options import JoinOptions
from node.plant import PlantOptions, altering, join_options
from protocol import draws, phantoms
from protocol.engine import GenerateOutput
from protocol.errors import UsageError
from protocol.identity import load_identity
from protocol.phantoms import Phantom
from protocol.records import ACCEPT, REJECT
from protocol.state import RunState
from tests.judge_rig import TINY, Rig, make_rig, tokens_of
from tests.node_run import BIN, NodeRun, is_running
from trainer import plants
from trainer.plants import Picture, next_phantom, pause_s
from verifier.archive import RunArchive
from verifier.completion import completion_text
from verifier.model import load_policy

OWN = bytes(range(32))


def key(phantom: Phantom) -> bytes:
    return phantoms.identity(draws.period_secret(OWN, phantom.period), phantom.number).public


def picture(period: int = 0, entered: int = 0, finished: bool = False, **nodes: str) -> Picture:
    return Picture(finished, period, entered, {bytes.fromhex(name): state for name, state in nodes.items()})


def seen(phantom: Phantom, state: str) -> dict[str, str]:
    return {key(phantom).hex(): state}


def keep_secret(run: NodeRun, secret: bytes) -> None:
    """The coordinator's secret, before the run starts: who works, and how much of it is altered, follows from it."""
    path = run.dir / "state" / "draws.secret"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(secret)
    path.chmod(0o600)


def test_a_phantom_goes_on_until_it_is_suspended_or_its_period_ends() -> None:
    first = next_phantom(OWN, picture())
    assert first is not None and 0 <= first.period <= phantoms.AHEAD
    assert next_phantom(OWN, picture()) == first, "a restart of `node plant` draws the same"
    for state in ("probation", "active", "paused"):
        assert next_phantom(OWN, picture(**seen(first, state))) == first
    second = next_phantom(OWN, picture(**seen(first, "suspended")))
    assert second not in (first, None)
    late = draws.PERIOD_SUBMISSIONS - phantoms.LAST_SUBMISSIONS
    young = Phantom(0, 3)
    assert next_phantom(OWN, picture(entered=late - 1, **seen(young, "active"))) == young
    after = next_phantom(OWN, picture(entered=late, **seen(young, "active")))
    assert after is not None and after.period > 0
    old = Phantom(phantoms.AHEAD, 4)
    for period in range(phantoms.AHEAD + 1):
        assert next_phantom(OWN, picture(period=period, **seen(old, "active"))) == old


def test_nobody_works_before_the_first_period_after_the_end_and_when_all_were_suspended() -> None:
    everybody = [Phantom(period, n) for period in range(phantoms.AHEAD + 1) for n in range(phantoms.PER_PERIOD)]
    gone = {name: state for one in everybody for name, state in seen(one, "suspended").items()}
    assert next_phantom(OWN, picture(period=-1)) is None
    assert next_phantom(OWN, picture(finished=True)) is None
    assert next_phantom(OWN, picture(**gone)) is None
    assert next_phantom(OWN, picture(period=1, **gone)).period == phantoms.AHEAD + 1


def test_phantoms_come_at_any_time_and_have_names_of_their_own() -> None:
    some = [Phantom(period, number) for period in range(4) for number in range(8)]
    pauses = sorted(pause_s(OWN, one, 90.0) for one in some)
    assert pauses[0] < 20.0 and 70.0 < pauses[-1] < 90.0
    names = {plants.name_of(OWN, one) for one in some}
    assert len(names) == len(some) and all(re.fullmatch(r"[0-9a-f]{12}", name) for name in names)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b'{"phase": 1, "nodes": 3}', b'{"nodes": [{"key": "zz"}]}', b"[" * 99_999]
)
def test_anything_else_than_a_status_is_none(raw: bytes) -> None:
    assert Picture.read(raw) is None


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "draws.secret"
    with pytest.raises(UsageError, match="trainer serve"):
        plants.read_secret(tmp_path)
    path.write_bytes(OWN)
    path.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        plants.read_secret(tmp_path)
    path.chmod(0o600)
    assert plants.read_secret(tmp_path) == OWN
    path.write_bytes(OWN[:-1])
    with pytest.raises(UsageError, match="damaged"):
        plants.read_secret(tmp_path)
    done = subprocess.run(
        [str(BIN / "node"), "plant", str(tmp_path), "--json"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and "run.toml" in done.stdout + done.stderr


@pytest.fixture(scope="module")
def rig() -> Rig:
    return make_rig(load_policy(TINY), make("word"), 2, 4, 9, (1,))


def test_a_phantom_answers_honestly_but_for_plants_and_scores_the_text_it_sends(rig: Rig) -> None:
    """Else the reward alone would tell, without a model."""
    tokenizer = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    text = lambda rollout: completion_text(tokenizer, tokens_of(rollout), (1,))  # noqa: E731
    outputs = [
        GenerateOutput("", one.tokens, one.logprobs, one.finish, text(one), one.proofs) for one in rig.honest.rollouts
    ]
    alter, other_texts = altering(OWN, 0), 0
    for number in range(64):
        lease_id = number.to_bytes(16, "big")
        work = Work(dataclasses.replace(rig.lease, lease_id=lease_id), rig.run, rig.environment, 0.0)
        made = alter(work, outputs, tokenizer)
        assert (made != outputs) is phantoms.is_plant(OWN, 0, lease_id)
        assert all(one.text == text(one) for one in made)
        other_texts += [one.text for one in made] != [one.text for one in outputs]
    assert other_texts >= 3


def test_a_phantoms_key_is_in_its_home_and_it_joins_like_anybody(tmp_path: Path) -> None:
    run = NodeRun(tmp_path / "run")
    keep_secret(run, OWN)
    options = join_options(PlantOptions(run.dir), tmp_path / "homes", Phantom(0, 2))
    kept = options.home / "identity.pem"
    assert load_identity(kept).public == key(Phantom(0, 2)) and stat.S_IMODE(kept.stat().st_mode) == 0o600
    stranger = JoinOptions(
        "inference", str(run.dir / "join.hw"), options.home, name=options.name, yes=True, as_json=True
    )
    assert options.alter is not None and dataclasses.replace(options, alter=None) == stranger
    assert re.fullmatch(r"[0-9a-f]{12}", options.name)


def verdicts(run: NodeRun) -> dict[bool, int]:
    """How many verdicts there are on plants and on a phantom's honest work; each says what is true."""
    archive, state, found = RunArchive.open(run.dir), RunState(), {True: 0, False: 0}
    for sealed in archive.unbroken():
        state.apply(sealed.index, sealed.entry)
    known = plants.Plants(state, plants.read_secret(run.dir / "state"))
    for fact in archive.facts.verdicts.values():
        assert known.phantom(fact.submission.owner) is not None
        plant = known.is_plant(state.leases[fact.submission.lease.lease_id])
        assert (REJECT in {one.outcome for one in fact.verdict.outcomes}) is plant
        assert plant or {one.outcome for one in fact.verdict.outcomes} == {ACCEPT}
        found[plant] += 1
    return found


@pytest.mark.heavy
def test_phantoms_work_beside_a_run_and_honest_validators_judge_them_as_they_are(tmp_path: Path) -> None:
    """Real processes: the only node of this run is `node plant`. What validators reject is what it altered."""
    run = NodeRun(tmp_path / "run", steps=400, relays=())
    busy = (bytes([number]) * 32 for number in range(256))
    keep_secret(run, next(one for one in busy if phantoms.SHARES[next_phantom(one, picture()).number % 5] == 1 / 2))
    sent = lambda name: run.status().get("plants", {}).get(name, 0)  # noqa: E731
    try:
        run.serve()
        run.publish()
        run.advance()
        for name in ("validator-1", "validator-2"):  # what one rejects waits for the other
            run.join(name, "validator")
        run.wait("a draw period", lambda: run.status().get("plants", {}).get("period") == 0)
        process = run.start("node", "plant", str(run.dir / "run.toml"), "--pause", "0", "--json")
        run.wait("a phantom's first submission", lambda: sent("judged") > 0)
        run.advance_until("both kinds, judged", lambda: all(verdicts(run).values()), 25)
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        process.terminate()
        assert process.wait(20) == 0
        run.wait("its children to be gone", lambda: not any(is_running(int(child)) for child in children), 20)
        nodes = run.status()["nodes"]
        assert all(node["state"] != "suspended" for node in nodes if node["role"] == "validator")
        assert all(re.fullmatch(r"[0-9a-f]{12}", node["name"]) for node in nodes if node["role"] == "inference")
        own = plants.read_secret(run.dir / "state")
    finally:
        run.close()
    log = (run.dir / "logs" / "node-plant.log").read_text()
    assert "Traceback" not in log and json.loads(log.splitlines()[0])["event"] == "phantom"
    assert all(verdicts(run).values())
    for secret in (own, *(draws.period_secret(own, period) for period in range(4))):
        for path in (run.dir / "logs").iterdir():
            assert secret.hex() not in path.read_text(errors="replace")
