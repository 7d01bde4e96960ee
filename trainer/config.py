"""run.toml: every knob of a run's own machines, typed; unknown keys are refused.

    run.toml  ->  load()  ->  RunConfig        render()  ->  run.toml with each field's docstring as a comment

What all machines of a run must agree on (leases, sampling, thresholds, environments) is in the signed manifest and not
here: a key that stands in both could disagree. Nothing here is read from environment variables.

Not covered: making a run (`trainer.init`), the manifest (`protocol.manifest`).
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from protocol.errors import ProtocolError, UsageError
from protocol.identity import parse_peer_id
from protocol.limits import MIB

_ENDPOINT = re.compile(r"^(?P<host>[0-9a-zA-Z_.:\-\[\]]+):(?P<port>\d{1,5})$")


_key = functools.lru_cache(maxsize=1024)(parse_peer_id)
"""The relays' keys are asked for at every heartbeat; reading one from its base58 is some fifty microseconds."""


class Section(BaseModel):
    """A table of run.toml. A misspelt key is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RunSection(Section):
    """What the run is called and how long it is."""

    name: str = Field(default="demo", min_length=1, max_length=64)
    """Name people see; also in the manifest."""
    steps: int = Field(default=150, ge=1, le=10_000_000)
    """Optimiser steps of the RL stage; must equal the manifest's."""
    profile: str = Field(default="fp32", pattern="^(fp32|bf16)$")
    """What nodes compute in, `fp32` or `bf16`; must equal the manifest's. Learner and validators compute in float32."""


class ModelSection(Section):
    """Which model the learner starts from; its files are in RUN/model."""

    preset: str = Field(default="tiny", pattern="^(tiny|smollm2)$")
    """`tiny` (330K parameters, in the package) or `smollm2` (SmolLM2-135M-Instruct)."""
    storage_dtype: str = Field(default="float32", pattern="^(float32|bfloat16)$")
    """Dtype of published weights; the learner computes in float32 either way."""


class EnvironmentSection(Section):
    """Which tasks; for people and the learner's supervised stage. The manifest binds them by hash."""

    names: list[str] = Field(default=["word/reverse"], min_length=1, max_length=16)
    """`name` or `name/option`, for example `word/reverse` or `addition`."""


class ControlSection(Section):
    """The libp2p host process of the coordinator."""

    listen: str = "/ip4/127.0.0.1/tcp/4801"
    """Multiaddr without the peer id. Strangers' control messages arrive here."""
    max_connections: int = Field(default=1024, ge=8, le=65_536)
    """Connections the host keeps at once."""


class IngressSection(Section):
    """The coordinator's HTTP door: submissions in, jobs out."""

    listen: str = "127.0.0.1:4802"
    """HOST:PORT."""
    spool_bytes: int = Field(default=512 * MIB, ge=MIB)
    """Bound on uploads in flight and submissions without a decision, all nodes together; over it uploads get 507."""
    spool_bytes_per_key: int = Field(default=64 * MIB, ge=MIB)
    """The same for one node; over it 429."""
    spool_bytes_per_address: int = Field(default=256 * MIB, ge=MIB)
    """The same for all nodes of one address; over it 429. Behind a reverse proxy all nodes have one address."""
    uploads_per_address: int = Field(default=16, ge=1)
    """Uploads in flight from one address; over it 429."""
    max_connections: int = Field(default=512, ge=8)
    """Open HTTP connections, all addresses together."""
    max_submission_bytes: int = Field(default=8 * MIB, ge=4096, le=64 * MIB)
    """Largest compressed submission a lease allows."""

    @field_validator("listen")
    @classmethod
    def _endpoint(cls, value: str) -> str:
        return check_endpoint(value)


class OriginSection(Section):
    """Where `shardcast publish RUN` serves weights to relays."""

    listen: str = "127.0.0.1:4803"
    """HOST:PORT."""
    open: bool = False
    """Serve whoever asks. Otherwise only whom the coordinator sends there: the first two relays and the validators."""
    codec: str = Field(default="gaps", pattern="^(gaps|classes|anchor|raw)$")
    """How weights travel, always without loss: `gaps` (patches where they pay), `classes` (patches a third shorter for
    more CPU: below 50 MB/s, or where egress is paid), `anchor` (every policy coded by itself), `raw`."""

    @field_validator("listen")
    @classmethod
    def _endpoint(cls, value: str) -> str:
        return check_endpoint(value)


class CoordinatorSection(Section):
    """The coordinator's pace and patience."""

    state_dir: str = "state"
    """Folder of the live ledger, on a local disk; relative to the run directory."""
    job_deadline_s: float = Field(default=60.0, gt=0)
    """A job without a verdict this long after a validator took it is drawn again."""
    member_timeout_s: float = Field(default=15.0, gt=0)
    """A member not heard from for this long gets no new jobs, and its address is not handed out."""
    joins_per_address: int = Field(default=64, ge=1)
    """New members one address (an IPv6 /64) may bring in one burst; twelve more a minute after that."""
    uncollected_leases: int = Field(default=2, ge=1, le=64)
    """Open leases an active node may hold at once."""
    drain_s: float = Field(default=60.0, ge=0)
    """How long after the last step the coordinator waits for verdicts that are still open."""
    linger_s: float = Field(default=10.0, ge=0)
    """How long a finished run keeps answering heartbeats, so that nodes learn that it is over."""


class GrantsSection(Section):
    """Keys the operator admits, as libp2p peer ids. `trainer serve` writes each into the ledger once."""

    validators: list[str] = Field(default=[], max_length=1024)
    """Peer ids (`12D3Koo...`) that may judge rollouts."""
    relays: list[str] = Field(default=[], max_length=1024)
    """Peer ids whose weight addresses are handed to nodes. Empty: nodes pull from the origin itself."""

    @field_validator("validators", "relays")
    @classmethod
    def _peers(cls, value: list[str]) -> list[str]:
        for text in value:
            try:
                parse_peer_id(text)
            except ProtocolError as exc:
                raise ValueError(f"{text!r} is no peer id; `node id` on that machine prints it") from exc
        return value

    def keys(self, role: str) -> list[bytes]:
        """The public keys granted `validator` or `relay`."""
        return [_key(text) for text in (self.validators if role == "validator" else self.relays)]


class LearnerSection(Section):
    """`trainer learn`."""

    learning_rate: float = Field(default=3e-4, gt=0)
    """AdamW's. Learning rate times staleness is what governs stability: 1e-3 collapses the tiny model."""
    warmup_steps: int = Field(default=3, ge=0)
    """Steps over which the learning rate rises linearly."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip of the importance ratio is 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip of the importance ratio is 1 + clip_high."""
    ratio_cap: float = Field(default=4.0, gt=1)
    """Second bound of the two-sided clip, for negative advantages (INTELLECT-2's delta)."""
    grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's."""
    betas: list[float] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    """AdamW's."""
    threads: int = Field(default=1, ge=1, le=1024)
    """Torch threads. One keeps a resumed run bit-identical."""
    checkpoint_every: int = Field(default=25, ge=1)
    """Steps between checkpoints that also hold the optimiser's state."""
    keep_checkpoints: int = Field(default=4, ge=1)
    """Learner checkpoints kept on disk; published ones are kept by the origin."""
    seed: int = Field(default=0, ge=0)
    """Seed of the learner."""


class SftSection(Section):
    """The supervised stage before RL."""

    steps: int = Field(default=100, ge=0)
    """Optimiser steps; 0 skips the stage."""
    batch_size: int = Field(default=64, ge=1)
    """Examples a step."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """Peak learning rate."""
    cpu_seconds: float = Field(default=20.0, gt=0)
    """The stage stops here even if steps are left."""
    mixture: bool = True
    """Train on the mixture of transforms, of which the RL environment rewards one."""


class RunConfig(Section):
    """All of run.toml."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    environment: EnvironmentSection = EnvironmentSection()
    control: ControlSection = ControlSection()
    ingress: IngressSection = IngressSection()
    origin: OriginSection = OriginSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    grants: GrantsSection = GrantsSection()
    learner: LearnerSection = LearnerSection()
    sft: SftSection = SftSection()

    _path: Path = PrivateAttr(default=Path("run.toml"))

    @property
    def run_dir(self) -> Path:
        """The folder of run.toml."""
        return self._path.parent

    @property
    def state_dir(self) -> Path:
        """Where the live ledger is."""
        return self.run_dir / self.coordinator.state_dir


def check_agrees(config: RunConfig, steps: int, profile: str) -> None:
    """Hold what stands in run.toml and in the signed manifest, for people, against the manifest's.

    Raises:
        UsageError: they disagree.
    """
    if config.run.steps != steps:
        raise UsageError(f"run.toml says {config.run.steps} steps, the signed manifest {steps}; correct [run] steps")
    if config.run.profile != profile:
        raise UsageError(
            f"run.toml says the profile {config.run.profile}, the signed manifest {profile}; correct [run] profile"
        )


def check_endpoint(text: str) -> str:
    """Return `text` if it is HOST:PORT with a port of 0..65535, else raise ValueError."""
    match = _ENDPOINT.match(text)
    if match is None or int(match["port"]) > 65_535:
        raise ValueError(f"{text!r} is not HOST:PORT, for example 127.0.0.1:4802")
    return text


def split_endpoint(text: str) -> tuple[str, int]:
    """`HOST:PORT` as a pair; brackets around an IPv6 host are dropped."""
    host, port = check_endpoint(text).rsplit(":", 1)
    return host.strip("[]"), int(port)


def _explain(exc: ValidationError) -> str:
    lines = []
    for error in exc.errors():
        where = ".".join(str(part) for part in error["loc"])
        known = error["type"] != "extra_forbidden"
        lines.append(f"{where}: {error['msg']}" if known else f"{where}: unknown key")
    return "; ".join(lines)


def parse(values: dict[str, Any], path: Path) -> RunConfig:
    """Check decoded settings; `path` is the run.toml they are for, which need not be there.

    Raises:
        UsageError: an unknown key or a value out of its range; names every one.
    """
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as exc:
        raise UsageError(_explain(exc)) from exc
    config._path = path
    return config


def load(path: Path) -> RunConfig:
    """Read and check RUN/run.toml; a run directory is accepted in its place.

    Raises:
        UsageError: missing, unreadable, not TOML, or a key that does not hold.
    """
    path = Path(path)
    if path.is_dir() or (path.suffix != ".toml" and not path.exists()):
        path = path / "run.toml"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise UsageError(f"{path} does not exist; {_where_to_make_one(path.parent)}") from exc
    except OSError as exc:
        raise UsageError(f"{path} cannot be read ({exc.strerror}); its owner must allow it") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path} is no valid TOML ({exc}); whoever edits this file must correct it") from exc
    try:
        return parse(values, path.absolute())
    except UsageError as exc:
        raise UsageError(
            f"{path}: {exc}. Whoever edits this file must correct it; `trainer init` writes one that documents every "
            "key"
        ) from exc


def _where_to_make_one(folder: Path) -> str:
    """What to type where no run is. A folder that holds other things is no place for one."""
    try:
        other = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError:
        other = True
    if other:
        return "give the directory of a run, or make one in a folder of its own: trainer init runs/first"
    return f"make a run first: trainer init {folder}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return f"{value:.1f}"
    return repr(value)


def render(config: RunConfig) -> str:
    """The text of run.toml: every key with its value, above it what it does."""
    lines = ["# A headwater run. Read by trainer, shardcast and the demo; unknown keys are refused."]
    for name in RunConfig.model_fields:
        section: Section = getattr(config, name)
        lines += ["", f"# {(type(section).__doc__ or '').strip()}", f"[{name}]"]
        for key, field in type(section).model_fields.items():
            lines += [f"# {line}" for line in (field.description or "").splitlines()]
            lines.append(f"{key} = {_toml(getattr(section, key))}")
    return "\n".join(lines) + "\n"
