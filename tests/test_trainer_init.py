"""run.toml and run directories: every key typed, keys private, nothing half-written taken for a run."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from protocol.errors import UsageError
from protocol.identity import Identity, load_identity, peer_id_text
from protocol.manifest import Thresholds, open_manifest, parse_share_code
from shardcast.layout import layout_hash, layout_of_safetensors
from trainer import config
from trainer.coordinator import load_run
from trainer.init import load_bf16_thresholds, load_thresholds, make_run

NOISE = Thresholds(1e-4, 2, 1e-4, 1e-3, 1e-3, 1, 1, 0.0, 0, 0.0, 0.0, "tests")


def test_a_run_directory_holds_what_every_role_starts_from(tmp_path: Path) -> None:
    validator = Identity.generate().public
    run = make_run(
        tmp_path / "run",
        steps=7,
        seed=5,
        validators=[validator],
        environment="reverse,sort",
        overrides={"leases.tasks_per_step": 4, "learner.learning_rate": 1e-4},
        thresholds=NOISE,
    )
    loaded = config.load(tmp_path / "run")
    assert loaded.run_dir == tmp_path / "run" and loaded.state_dir == tmp_path / "run" / "state"
    assert (loaded.run.steps, loaded.learner.seed, loaded.learner.learning_rate) == (7, 5, 1e-4)
    assert loaded.grants.keys("validator") == [validator]
    assert load_run(loaded).genesis.id == run.id
    manifest = run.manifest
    assert manifest.leases.tasks_per_step == 4 and manifest.steps == 7
    assert [e.name for e in manifest.environments] == ["word", "word"]
    assert manifest.model.layout == layout_hash(layout_of_safetensors(tmp_path / "run" / "model" / "model.safetensors"))
    assert {f.name for f in manifest.model.files} >= {"config.json", "tokenizer.json"}
    code = parse_share_code((tmp_path / "run" / "join.hw").read_text())
    assert code.run == run.id and code.addresses == manifest.control
    assert code.addresses[0].endswith(peer_id_text(manifest.coordinator_transport))
    ports = {
        loaded.control.listen.rsplit("/", 1)[1],
        *(e.listen.rsplit(":", 1)[1] for e in (loaded.ingress, loaded.origin)),
    }
    assert len(ports) == 3


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("::1", "[::1]")])
def test_a_run_is_reached_at_the_address_its_operator_gave(tmp_path: Path, host: str, shown: str) -> None:
    run = make_run(tmp_path / "run", host=host, thresholds=NOISE)
    loaded = config.load(tmp_path / "run")
    (control,) = run.manifest.control
    assert control.startswith(f"/ip{6 if ':' in host else 4}/{host}/tcp/") and loaded.control.listen in control
    assert run.manifest.ingress == (f"http://{loaded.ingress.listen}",)
    assert loaded.ingress.listen.startswith(f"{shown}:") and loaded.origin.listen.startswith(f"{shown}:")
    assert parse_share_code((tmp_path / "run" / "join.hw").read_text()).addresses == (control,)


def test_private_keys_are_readable_by_their_owner_only_and_stand_nowhere_else(tmp_path: Path) -> None:
    make_run(tmp_path / "run", thresholds=NOISE)
    keys = tmp_path / "run" / "keys"
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    secrets = []
    for path in keys.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        secrets.append(load_identity(path).private_seed())
    assert len(secrets) == 4
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and path.parent != keys:
            assert not any(secret in path.read_bytes() for secret in secrets), path


def test_a_directory_with_a_run_is_never_touched(tmp_path: Path) -> None:
    make_run(tmp_path / "run", thresholds=NOISE)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="already holds a run"):
        make_run(tmp_path / "run", thresholds=NOISE)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}


def test_an_init_that_was_cut_short_is_completed_with_the_same_keys(tmp_path: Path) -> None:
    first = make_run(tmp_path / "run", thresholds=NOISE)
    (tmp_path / "run" / "run.toml").unlink()
    again = make_run(tmp_path / "run", thresholds=NOISE)
    assert again.manifest.root == first.manifest.root
    assert load_run(config.load(tmp_path / "run")).genesis.id == again.id


@pytest.mark.parametrize("lost", ["manifest.hw", "keys/coordinator.pem", "model/tokenizer.json"])
def test_a_run_directory_with_a_piece_missing_is_refused_by_name(tmp_path: Path, lost: str) -> None:
    make_run(tmp_path / "run", thresholds=NOISE)
    (tmp_path / "run" / lost).unlink()
    with pytest.raises(UsageError, match=lost):
        load_run(config.load(tmp_path / "run"))


def test_a_manifest_that_is_damaged_or_disagrees_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "run", thresholds=NOISE, steps=5)
    path = tmp_path / "run" / "run.toml"
    path.write_text(path.read_text().replace("steps = 5\n", "steps = 6\n", 1))
    with pytest.raises(UsageError, match="6 steps, the signed manifest 5"):
        load_run(config.load(path))
    path.write_text(path.read_text().replace("steps = 6\n", "steps = 5\n", 1))
    manifest = tmp_path / "run" / "manifest.hw"
    raw = manifest.read_bytes()
    manifest.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(UsageError, match="does not hold"):
        load_run(config.load(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[learner]\nlr = 3\n", r"learner.lr: unknown key"),
        ("[lerner]\n", r"lerner: unknown key"),
        ("[run]\nsteps = 0\n", r"run.steps"),
        ("[run]\nsteps = true\nname = 3\n", r"run.name"),
        ('[ingress]\nlisten = "nowhere"\n', r"not HOST:PORT"),
        ('[grants]\nvalidators = ["me"]\n', r"no peer id"),
        ("[run\n", r"no valid TOML"),
    ],
)
def test_a_wrong_key_or_value_in_run_toml_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        config.load(tmp_path / "run.toml")


def test_run_toml_explains_every_key_and_reads_back_the_same(tmp_path: Path) -> None:
    whole = config.RunConfig()
    text = config.render(whole)
    (tmp_path / "run.toml").write_text(text)
    assert config.load(tmp_path).model_dump() == whole.model_dump()
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if " = " in line and not line.startswith("#"):
            assert lines[number - 1].startswith("# "), f"{line} has no explanation"


def test_a_missing_or_unusable_measurement_of_honest_noise_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import verifier

    monkeypatch.setattr(verifier, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(UsageError, match=r"never measured.*verifier calibrate"):
        make_run(tmp_path / "run")
    assert not (tmp_path / "run").exists(), "nothing is written before everything is known"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "noise-tiny.json").write_text("{}")
    with pytest.raises(UsageError, match="does not hold"):
        load_thresholds("tiny")


def test_a_bf16_run_of_longer_answers_than_were_measured_is_refused(tmp_path: Path) -> None:
    """Of 3,840 honest rollouts of the tiny model 4 were rejected: they were 40 letters long, its calibration 7."""
    longer = {"sampling.max_new_tokens": 48}
    with pytest.raises(UsageError, match=r"up to 9 tokens.*is 48.*--tokens 0,48"):
        make_run(tmp_path / "run", profile="bf16", overrides=longer)
    assert not (tmp_path / "run").exists(), "nothing is written before everything is known"
    measured = load_bf16_thresholds("tiny")
    for name, run in (
        ("own", make_run(tmp_path / "own", profile="bf16", overrides=longer, bf16=measured)),
        ("fp32", make_run(tmp_path / "fp32", overrides=longer)),
    ):
        assert run.manifest.sampling.max_new_tokens == 48, name


def test_a_bf16_run_carries_what_was_measured_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", profile="bf16")
    manifest, loaded = run.manifest, config.load(tmp_path / "run")
    assert (manifest.profile, loaded.run.profile) == ("bf16", "bf16")
    assert manifest.bf16 == load_bf16_thresholds("tiny") and manifest.bf16.measured_rollouts >= 600
    assert manifest.thresholds.proof_median == 0.0, "no fp32 proof passes here"
    assert make_run(tmp_path / "two", overrides={"run.profile": "bf16"}).manifest.bf16 == manifest.bf16
    fp32 = make_run(tmp_path / "fp32").manifest
    assert fp32.bf16 is None and fp32.thresholds == load_thresholds("tiny")
    text = (tmp_path / "run" / "run.toml").read_text()
    (tmp_path / "run" / "run.toml").write_text(text.replace('profile = "bf16"', 'profile = "fp32"'))
    with pytest.raises(UsageError, match=r"profile fp32, the signed manifest bf16; correct \[run\] profile"):
        load_run(config.load(tmp_path / "run"))

    import verifier

    monkeypatch.setattr(verifier, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(UsageError, match=r"tiny-bf16 was never measured.*--profile bf16.*verifier calibrate"):
        make_run(tmp_path / "three", profile="bf16")
    assert not (tmp_path / "three").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"profile": "fp8"}, "run.profile"),
        ({"preset": "huge"}, "no preset"),
        ({"environment": "word/backwards"}, "environment 'word/backwards' for tiny; choose from reverse"),
        ({"environment": "chess"}, "environment 'chess'"),
        ({"overrides": {"leases.speed": 1}}, "leases.speed is no setting"),
        ({"overrides": {"nonsense": 1}}, "names no section"),
        ({"overrides": {"learner.lr": 1}}, "learner.lr: unknown key"),
        ({"control_port": 80, "ingress_port": 80}, "three different"),
        ({"steps": 0}, "run.steps"),
        ({"host": "0.0.0.0"}, "not where members reach you"),
        ({"host": "my-laptop"}, "no IP address"),
        ({"host": "192.0.2.1"}, "no address of this machine"),
    ],
)
def test_what_init_cannot_do_is_refused_with_its_name(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_run(tmp_path / "run", thresholds=NOISE, **change)
    assert not (tmp_path / "run").exists(), "nothing is written before everything is known"


def test_the_manifest_opens_for_strangers(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", thresholds=NOISE)
    assert open_manifest((tmp_path / "run" / "manifest.hw").read_bytes(), run.id).manifest == run.manifest
