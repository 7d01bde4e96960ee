"""Pairs of consecutive weights in bfloat16 that `benchmarks.codec` codes, and where they are kept.

    LM      20 steps of AdamW on SmolLM2-135M with float32 master weights, over docstrings of the standard library; what
            it would publish before and after steps 10 and 20 at four learning rates
    GRPO    policy-gradient steps on SmolLM2-135M by the learner itself (`detection_pool.make_weights`): what it
            published before and after the last one

    tiny    policy-gradient steps of the demo's model by the learner itself, float32, at the demo's rate; made anew each
            time

One gradient stream serves all four rates: the weights that make the gradients follow 1e-6, and the same direction is
applied at each rate to its own master weights. Those begin inside the cell of their bfloat16, evenly spread: in the
middle of a run the part that rounding takes off is not zero, as it is at its start.

Making a stream takes minutes of CPU; each is a folder under the cache directory. Two steps of four rates take 2.6 GB.

Not covered: what is measured on them (`codec`).
"""

from __future__ import annotations

import importlib
import inspect
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from benchmarks.contract import CouldNotRunError
from benchmarks.detection_tiny import TINY
from environments.registry import make
from node.decode import DecodeRequest, decode
from protocol.seeds import sampling_seed
from trainer.config import LearnerSection
from trainer.incoming import Sequence, TrainingBatch
from trainer.update import Policy
from verifier.model import completion_text, load_policy, load_tokenizer, prompt_ids

U16 = npt.NDArray[np.uint16]

FORMAT = 1
"""Part of the cache folder's name. A change in how a stream is made needs another number."""
RATES = (1e-6, 5e-6, 1e-5, 1e-4)
STEPS = 20
KEPT = (10, 20)
"""The steps whose two sides are kept."""
TINY_STEPS = 6
_TINY_TASKS, _TINY_SAMPLES = 8, 8
ROWS, TOKENS = 4, 128
"""Texts and tokens of one step."""
_BETAS, _EPS, _DECAY, _CLIP = (0.9, 0.95), 1e-8, 0.01, 1.0
_MODULES = (
    "argparse", "ast", "asyncio", "collections", "configparser", "csv", "ctypes", "datetime", "decimal", "difflib",
    "doctest", "email.message", "enum", "fractions", "ftplib", "functools", "http.client", "imaplib", "inspect",
    "ipaddress", "json", "logging", "mailbox", "optparse", "os", "pathlib", "pickle", "platform", "plistlib", "queue",
    "random", "re", "shutil", "smtplib", "socket", "statistics", "string", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "traceback", "types", "typing", "unittest", "urllib.request", "uuid", "warnings", "wave",
    "xml.dom.minidom", "xmlrpc.client", "zipfile", "zoneinfo",
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """The weights of two consecutive policies, all tensors in canonical order, bfloat16 bits."""

    name: str
    old_N: U16
    new_N: U16


def lm_pairs(directory: Path, cache: Path, say: Callable[[str], None]) -> dict[float, list[Path]]:
    """The files of the LM stream by learning rate, in order of their step; made where they are missing."""
    folder = cache / f"codec-lm-{FORMAT}-{_digest(directory)}"
    paths = {rate: [folder / f"{rate:g}-{step}.npz" for step in KEPT] for rate in RATES}
    if not all(path.exists() for each in paths.values() for path in each):
        folder.mkdir(parents=True, exist_ok=True)
        _train(directory, lambda rate, step: folder / f"{rate:g}-{step}.npz", say)
    return paths


def grpo_pair(before: Path, after: Path) -> Pair:
    """Two policy directories in float32, as a learner whose storage is bfloat16 would publish them.

    Raises:
        CouldNotRunError: they are not there.
    """
    sides = []
    for folder in (before, after):
        if not (folder / "model.safetensors").exists():
            raise CouldNotRunError(f"no weights in {folder}; run `python -m benchmarks.detection --part stale` first")
        model = load_policy(folder, torch.float32).model
        sides.append(np.concatenate([bits(one) for _, one in sorted(model.named_parameters())]))
    return Pair("grpo 1e-06", *sides)


def tiny_sides(steps: int = TINY_STEPS) -> list[bytes]:
    """The weights of the demo's model before and after each of its first steps: canonical data, all float32.

    A step answers `word` tasks, eight times each; their rewards differ within most groups.
    """
    environment = make("word")
    policy = load_policy(TINY)
    model, tokenizer = policy.model, policy.tokenizer
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    storage = {name: torch.float32 for name, _ in model.named_parameters()}
    learner = Policy(model, LearnerSection(warmup_steps=0), storage, 1.0)
    stop = policy.eos if environment.stop is None else tuple(prompt_ids(tokenizer, environment.stop))
    sides = [_published(learner)]
    for step in range(steps):
        tasks = [environment.task(_TINY_TASKS * step + i) for i in range(_TINY_TASKS)]
        wanted = [(one, sample) for one in tasks for sample in range(_TINY_SAMPLES)]
        requests = [
            DecodeRequest(
                tuple(prompt_ids(tokenizer, one.prompt)),
                sampling_seed(bytes(32), bytes(32), one.index, sample),
                environment.max_new_tokens,
            )
            for one, sample in wanted
        ]
        model.eval()
        outputs = decode(model, requests, temperature=1.0, stop_tokens=stop)
        rewards = [
            environment.score(one, completion_text(tokenizer, out.tokens, stop), out.tokens[-1] in stop)
            for (one, _), out in zip(wanted, outputs, strict=True)
        ]
        groups = [one.index.to_bytes(8, "big") for one, _ in wanted]
        sequences = tuple(
            Sequence(group, request.prompt, out.tokens, out.logprobs, reward, 0)
            for group, request, out, reward in zip(groups, requests, outputs, rewards, strict=True)
        )
        learner.learn(TrainingBatch(step, sequences, frozenset()))
        sides.append(_published(learner))
    return sides


def _published(learner: Policy) -> bytes:
    """What its origin would publish: tensors of one dtype in the order of their names."""
    return b"".join(one.contiguous().numpy().tobytes() for _, one in sorted(learner.weights().items()))


def read_pair(path: Path) -> Pair:
    """A pair from its file: the old side, and where and what the new side's other items are."""
    with np.load(path) as held:
        old_N = held["old"]
        new_N = old_N.copy()
        new_N[held["places"]] = held["items"]
    return Pair(f"lm {path.stem}", old_N, new_N)


def bits(tensor: torch.Tensor) -> U16:
    """A tensor rounded to bfloat16, its bits in one row."""
    rounded = tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16)
    flat: U16 = rounded.numpy().ravel().view(np.uint16)
    return flat


def _digest(directory: Path) -> str:
    return blake3().update_mmap(directory / "model.safetensors").hexdigest()[:16]


def _texts() -> list[str]:
    """Docstrings of classes and functions, in an order that is always the same."""
    found = {}
    for name in _MODULES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some members are deprecated, and are texts like others
            module = importlib.import_module(name)
        for member, value in inspect.getmembers(module):
            if (inspect.isclass(value) or inspect.isfunction(value)) and value.__doc__:
                found[f"{name}.{member}"] = f"{name}.{member}: {value.__doc__}"
    texts = [found[name] for name in sorted(found)]
    random.Random(0).shuffle(texts)
    return texts


def _train(directory: Path, place: Callable[[float, int], Path], say: Callable[[str], None]) -> None:
    model = load_policy(directory, torch.float32).model
    tokenizer = load_tokenizer(directory)
    ids: list[int] = []
    for text in _texts():
        ids.extend(tokenizer.encode(text).ids)
    rows = torch.tensor(ids[: len(ids) // TOKENS * TOKENS]).view(-1, TOKENS)
    parameters: list[tuple[str, torch.nn.Parameter]] = sorted(model.named_parameters())
    draw = torch.Generator().manual_seed(1)
    masters: dict[float, list[torch.Tensor]] = {rate: [] for rate in RATES}
    for _, parameter in parameters:
        parameter.requires_grad_(True)
        inside = _spread(parameter.detach(), draw)
        for rate in RATES:
            masters[rate].append(inside.clone())
    moments = [(torch.zeros_like(one), torch.zeros_like(one)) for _, one in parameters]
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            for (_, parameter), master in zip(parameters, masters[RATES[0]], strict=True):
                parameter.copy_(master.to(torch.bfloat16))
        batch = rows[[((step - 1) * ROWS + row) % len(rows) for row in range(ROWS)]]
        loss = model(input_ids=batch, labels=batch).loss
        model.zero_grad()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_([one for _, one in parameters], _CLIP))
        old = {rate: [bits(one) for one in masters[rate]] for rate in RATES} if step in KEPT else {}
        with torch.no_grad():
            _apply(parameters, moments, masters, step)
        for rate, sides in old.items():
            _save(place(rate, step), np.concatenate(sides), np.concatenate([bits(one) for one in masters[rate]]))
        say(f"  LM step {step} of {STEPS}: loss {loss.item():.2f}, gradient {norm:.2f}")


def _spread(weight: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """The weight somewhere within 0.49 of a bfloat16's step from where it is."""
    exponent = torch.frexp(weight).exponent
    step = torch.ldexp(torch.ones_like(weight), exponent - 8)
    return weight + (torch.rand(weight.shape, generator=draw) - 0.5) * 0.98 * step


def _apply(
    parameters: list[tuple[str, torch.nn.Parameter]],
    moments: list[tuple[torch.Tensor, torch.Tensor]],
    masters: dict[float, list[torch.Tensor]],
    step: int,
) -> None:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) on every rate's master weights."""
    first, second = _BETAS
    for i, (_, parameter) in enumerate(parameters):
        gradient: Any = parameter.grad
        mean, square = moments[i]
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = (square / (1 - second**step)).sqrt_().add_(_EPS)
        direction = (mean / (1 - first**step)).div_(root)
        for rate, each in masters.items():
            each[i].mul_(1 - rate * _DECAY).sub_(direction, alpha=rate)


def _save(path: Path, old_N: U16, new_N: U16) -> None:
    places_K = np.flatnonzero(old_N != new_N).astype(np.uint32)
    aside = path.with_name(f".{path.name}")
    np.savez(aside, old=old_N, places=places_K, items=new_N[places_K])
    (aside if aside.suffix == ".npz" else aside.with_name(aside.name + ".npz")).replace(path)
