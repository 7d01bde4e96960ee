"""Files that say again what the archive binds: the model's folder, checkpoints and the reward curve."""

import json
import os
import shutil

import pytest

from protocol.errors import ReasonCode
from tests.archive_builder import build_archive
from verifier import cli
from verifier.archive import RunArchive
from verifier.audit import Options, audit

FILES_ONLY = Options(fraction=1e-12)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    built = build_archive(tmp_path_factory.mktemp("archive") / "run")
    archive = RunArchive.open(built.root)
    lines = [json.dumps({"event": "sft", "step": 1, "loss": 0.5}), json.dumps({"event": "resume", "step": 0})]
    for closed in archive.facts.batches.values():
        rewards = [rollout.reward for rollout in archive.batch(closed).rollouts]
        row = {"event": "step", "step": closed.step, "reward_mean": sum(rewards) / len(rewards)}
        lines.append(json.dumps({**row, "rollouts": len(rewards), "loss": None}))
    (built.root / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return built


@pytest.fixture
def copy(built, tmp_path):
    """A copy of all that the run's directory holds but its secrets."""
    target = tmp_path / "run"
    shutil.copytree(built.root, target, ignore=shutil.ignore_patterns("state", ".lock"))
    return target


def found(root):
    report = audit(root, FILES_ONLY)
    return [(failure.record, failure.reason) for failure in report.failures]


def change(path, at=-1):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def change_row(root, step, **fields):
    path = root / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["event"] == "step" and row["step"] == step:
            row.update(fields)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_copies_of_an_honest_run_hold_whole_or_in_part(copy):
    report = audit(copy, FILES_ONLY)
    assert (report.failures, report.unchecked) == ([], []) and report.finished
    (copy / "checkpoints" / "step-00000001" / "model.safetensors").unlink()
    shutil.rmtree(copy / "model")
    (copy / "metrics.jsonl").unlink()
    assert audit(copy, FILES_ONLY).exit_code == 0, "a copy may leave them out"


ARCHIVE = ("manifest.hw", "updates/", "ledger/", "submissions/", "batches/", "published/")
OUTSIDE = ("published/stats.json", "published/server.json", "published/origin-sequences.json")


def test_a_byte_changed_in_any_file_of_the_archive_is_found_as_the_quickstart_says(copy):
    """One byte of each file in turn; what docs/protocol.md lists as outside the archive is not found."""
    files = [path for path in sorted(copy.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    names = {str(path.relative_to(copy)): path for path in files}
    inside = [name for name in names if name.startswith(ARCHIVE) and name not in OUTSIDE]
    assert {name.split("/")[0] for name in inside} >= {entry.strip("/") for entry in ARCHIVE} - {"updates"}
    for name, path in names.items():
        whole = path.read_bytes()
        change(path, at=len(whole) // 2 if len(whole) % 2 else -1)
        report = audit(copy, FILES_ONLY)
        told = [*(failure.record for failure in report.failures), *(record for record, _ in report.unchecked)]
        if name in inside:
            place = name if name.startswith(("submissions/", "batches/")) else name.split("/")[0]
            assert report.exit_code == 1 and any(record.startswith(place) for record in told), (name, told)
        elif name in OUTSIDE or path.name == "checkpoint.json":
            assert report.exit_code == 0, name
        path.write_bytes(whole)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_changed_model_file_is_named(copy, name):
    change(copy / "model" / name)
    assert found(copy) == [(f"model/{name}", ReasonCode.HASH_MISMATCH)]


def test_base_weights_with_other_tensors_are_named_and_their_values_are_not(copy):
    path = copy / "model" / "model.safetensors"
    change(path)
    assert found(copy) == [], "no signed record binds them: docs/protocol.md says so"
    path.write_bytes(path.read_bytes().replace(b"model.norm.weight", b"model.norm.weighs"))
    assert found(copy) == [("model/model.safetensors", ReasonCode.HASH_MISMATCH)]


def test_a_published_steps_checkpoint_with_other_weights_is_named(copy):
    for step in (2, 0):
        change(copy / "checkpoints" / f"step-{step:08d}" / "model.safetensors")
    names = [f"checkpoints/step-{step:08d}/model.safetensors" for step in (0, 2)]
    assert found(copy) == [(name, ReasonCode.HASH_MISMATCH) for name in names]


def test_a_checkpoint_that_is_not_whole_or_not_published_is_none(copy):
    folder = copy / "checkpoints" / "step-00000002"
    change(folder / "model.safetensors")
    shutil.copytree(folder, folder.with_name("step-00000003"))
    shutil.copytree(folder, folder.with_name(".step-00000002.0.part"))
    (folder / "checkpoint.json").unlink()
    assert found(copy) == []


@pytest.mark.parametrize("fields", [{"reward_mean": 0.99}, {"rollouts": 7}, {"reward_mean": None}, {"rollouts": "8"},
                                    {"reward_mean": 10**400}])  # fmt: skip
def test_a_row_of_the_curve_that_its_batch_does_not_say_is_named(copy, fields):
    change_row(copy, 1, **fields)
    assert found(copy) == [("metrics.jsonl:4", ReasonCode.BATCH_WRONG)]


def test_a_row_of_a_step_that_was_never_trained_is_named_in_a_finished_run_only(copy):
    with (copy / "metrics.jsonl").open("a") as out:
        out.write(json.dumps({"event": "step", "step": 2, "reward_mean": 1.0, "rollouts": 8}) + "\n")
    assert found(copy) == [("metrics.jsonl:5", ReasonCode.BATCH_WRONG)]
    for path in sorted((copy / "ledger").glob("*.hwl"))[2:]:
        path.unlink()
    report = audit(copy, FILES_ONLY)
    assert not report.finished and report.failures == [], "the learner is ahead of what is sealed"


def test_a_file_of_wrong_rows_is_named_so_often_and_no_oftener(copy):
    with (copy / "metrics.jsonl").open("a") as out:
        out.write('{"event": "step", "step": 0}\n' * 5000)
    report = audit(copy, FILES_ONLY)
    assert len(report.failures) == 100
    assert any(record == "metrics.jsonl" and "were not read" in why for record, why in report.unchecked)


def test_what_a_kill_leaves_of_metrics_is_no_failure(copy):
    path = copy / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    assert audit(copy, FILES_ONLY).exit_code == 0, "a torn last line, a step behind"
    last = whole.splitlines(keepends=True)[-1]
    path.write_bytes(whole + last)
    assert audit(copy, FILES_ONLY).exit_code == 0, "a step twice"
    path.write_bytes(whole.replace(b"{", b"[", 1))
    assert found(copy) == [("metrics.jsonl:1", ReasonCode.MALFORMED)]


def test_a_step_left_out_of_the_curve_is_said(tmp_path):
    built = build_archive(tmp_path / "run", steps=3, leases_per_step=1)
    archive = RunArchive.open(built.root)
    with (built.root / "metrics.jsonl").open("w") as out:
        for closed in archive.facts.batches.values():
            rewards = [rollout.reward for rollout in archive.batch(closed).rollouts]
            row = {"event": "step", "step": closed.step, "reward_mean": sum(rewards) / 4, "rollouts": len(rewards)}
            out.write(json.dumps(row) + "\n" if closed.step != 1 else "")
    report = audit(built.root, FILES_ONLY)
    assert report.failures == [] and report.exit_code == 2
    assert [record for record, why in report.unchecked if "the first is step 1" in why] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "model/config.json", "model/model.safetensors",
             "checkpoints/step-00000002/model.safetensors"],
)  # fmt: skip
def test_a_copy_that_cannot_be_read_is_not_checked(copy, name):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    report = audit(copy, FILES_ONLY)
    assert report.failures == [] and [record for record, _ in report.unchecked] == [name]


def test_many_records_wrong_alike_are_one_line_for_people_and_all_in_json(tmp_path, capsys):
    root = build_archive(tmp_path / "run", steps=4, leases_per_step=1).root
    shutil.rmtree(root / "published")
    for name in ("config.json", "tokenizer.json"):
        change(root / "model" / name)
    assert cli.main(["audit", str(root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum("published/" in line for line in lines) == 2, "the blobs, and the policies"
    assert any("published/e0000-s00000000 and 4 more (--json): record-missing" in line for line in lines)
    assert any("DOES NOT HOLD  model/config.json, model/tokenizer.json: hash-mismatch" in line for line in lines)
    assert cli.main(["audit", str(root), "--json"]) == 1
    named = [item["record"] for item in json.loads(capsys.readouterr().out)["failures"]]
    assert {f"published/e0000-s{step:08d}" for step in range(5)} <= set(named)
