"""The environments this machine has, and how a manifest's specification becomes one of them.

Not covered: environments that come from elsewhere; nothing here is loaded from a run.
"""

from __future__ import annotations

import json

from environments.addition import Addition
from environments.base import Configuration, Environment
from environments.errors import EnvironmentSpecError
from environments.word import Word
from protocol.manifest import EnvironmentSpec

ENVIRONMENTS: dict[str, type[Environment]] = {kind.name: kind for kind in (Word, Addition)}


def make(name: str, configuration: Configuration | None = None) -> Environment:
    """An environment by name, its configuration completed by defaults.

    Raises:
        EnvironmentSpecError: no such environment, or a configuration it does not have.
    """
    if name not in ENVIRONMENTS:
        raise EnvironmentSpecError(f"there is no environment {name!r}; choose from {', '.join(sorted(ENVIRONMENTS))}")
    return ENVIRONMENTS[name](configuration or {})


def load(spec: EnvironmentSpec) -> Environment:
    """The environment a manifest names, if this machine has exactly that one.

    Raises:
        EnvironmentSpecError: another name, version, source, scoring or configuration than ours. The message says what
            to do.
    """
    try:
        configuration = json.loads(spec.configuration)
    except (ValueError, RecursionError) as exc:
        raise EnvironmentSpecError(f"the configuration of environment {spec.name!r} is not JSON") from exc
    if not isinstance(configuration, dict) or not all(type(v) in (str, int) for v in configuration.values()):
        raise EnvironmentSpecError(
            f"the configuration of environment {spec.name!r} is not a table of texts and integers"
        )
    ours = make(spec.name, configuration)
    if ours.spec() != spec:
        differs = [f for f in ("version", "source", "scoring", "configuration") if _field(ours, f) != getattr(spec, f)]
        raise EnvironmentSpecError(
            f"environment {spec.name!r} of this run is not the one installed here (differs in "
            f"{', '.join(differs) or 'digest'}); install the release of headwater that the run's operator names"
        )
    return ours


def _field(environment: Environment, name: str) -> object:
    return getattr(environment.spec(), name)
