"""The rollouts that `benchmarks.detection` judges: which there are, how each was made, and where they are kept.

A pool is some rollouts of one kind: honest ones of one variant (batch, attention kernel, threads, profile), or those of
one way to be dishonest. Every rollout is 128 sampled tokens of SmolLM2-135M at T = 1: the end of text does not end it,
so that a rate per rollout is one per 128 tokens. Rollout i of every pool answers the same prompt under the same seed.

Making them takes minutes of CPU each, so every pool is a file under the cache directory, and so are the weights that
`stale` pools need; what is there already is not made again. Another model, prompt set or `FORMAT` is another folder.

Not covered: proofs and what a verifier sees of them (`detection_judge`).

Shape suffixes: R rollouts, N sampled tokens, H hidden.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from benchmarks.contract import CouldNotRunError
from node import decode as decoding
from node.decode import DecodeRequest, decode
from protocol.files import write_atomic
from protocol.seeds import sampling_seed
from trainer import smollm2
from verifier.model import load_policy, load_tokenizer, prompt_ids
from verifier.profiles import profile_of

FORMAT = 1
"""Part of the cache folder's name. A change in what a pool holds needs another number."""
TOKENS = 128
_RUN, _NONCE = blake3(b"headwater benchmarks.detection").digest(), bytes(32)

HONEST_SYSTEM, OTHER_SYSTEM = "Answer at length.", "Answer in brief."
"""Equally many tokens, so that every token's noise is what the seed gives at its position."""
LONGER_SYSTEM = HONEST_SYSTEM + " Answer briefly."
"""What the first study added to its system prompt. The noise of such a pool is shifted back to the right positions, as
a node would that has the right prompt as well."""
_FORMS = (
    "What is the history of {}?",
    "Write a short story about {}.",
    "Explain {} to a child.",
    "List ten facts about {}.",
    "How would you teach a class on {}?",
    "Write a letter to a friend about {}.",
    "What goes wrong with {}, and why?",
    "Compare {} a century ago with today.",
)
_TOPICS = (
    "tea", "bridges", "glaciers", "chess", "sourdough bread", "lighthouses", "bicycles", "volcanoes", "railways",
    "honey bees", "typewriters", "tides", "compost", "clocks", "maps", "windmills", "whales", "fractions", "sleep",
    "paper", "earthquakes", "gardens", "libraries", "kites", "copper", "elections",
)  # fmt: skip
PROMPTS = len(_FORMS) * len(_TOPICS)

Model = Any


@dataclass(frozen=True)
class Pool:
    """One kind of rollouts.

    name: of its file. kind: `honest`, or the way to be dishonest. dtype: `fp32` or `bf16`, what its node computed in.
    rollouts: how many; with prompts `first`, `first` + 1 ... and, where `samples` is above 1, that many of each.
    sample: of the first one; the lease's own is 0, any other is another lease's seed.
    """

    name: str
    kind: str
    dtype: str = "fp32"
    rollouts: int = 16
    first: int = 0
    batch: int = 32
    attention: str = "sdpa"
    threads: int = 1
    temperature: float = 1.0
    sample: int = 0
    samples: int = 1

    @property
    def prompts(self) -> list[int]:
        """Which prompt each rollout answers."""
        return [self.first + i // self.samples for i in range(self.rollouts)]


HONEST_VARIANTS = (
    (2, "sdpa", 1, 16), (4, "sdpa", 1, 16), (8, "sdpa", 1, 16), (16, "sdpa", 1, 16), (18, "sdpa", 1, 18),
    (20, "sdpa", 1, 20), (8, "sdpa", 2, 16), (16, "sdpa", 2, 16), (4, "eager", 1, 16), (16, "eager", 1, 16),
    (8, "eager", 2, 16), (22, "eager", 2, 22),
)  # fmt: skip
"""Decode batch, attention kernel, threads, rollouts: 204 rollouts of as many prompts."""


def honest_pools(dtype: str, quick: bool = False) -> list[Pool]:
    """The honest variants, each prompt once. quick: every fourth of them, four rollouts each."""
    pools, first = [], 0
    for number, (batch, attention, threads, rollouts) in enumerate(HONEST_VARIANTS):
        count = min(4, rollouts) if quick else rollouts
        name = f"honest-{dtype}-{attention}-b{batch}-t{threads}-{count}"
        if not quick or number % 4 == 1:
            pools.append(Pool(name, "honest", dtype, count, first, batch, attention, threads))
        first += rollouts
    return pools


WEIGHTS_KINDS = ("int8", "fp8", "int4", "fp8-kv", "drop-layer", "prompt", "prompt-longer")
STALE_KINDS = ("stale-bf16", "stale-fp32")
SAMPLING_KINDS = ("greedy", "t0.7", "t0.9", "best-of-4")


def pool_of(kind: str, rollouts: int, dtype: str = "fp32") -> Pool:
    """The pool of one way to be dishonest."""
    name = f"{kind}-{dtype}-{rollouts}"
    temperature = {"greedy": 1e-4, "t0.7": 0.7, "t0.9": 0.9}.get(kind, 1.0)
    if kind == "best-of-4":
        return Pool(name, kind, dtype, 4 * rollouts, batch=64, sample=1, samples=4)
    return Pool(name, kind, dtype, rollouts, temperature=temperature)


@dataclass(frozen=True)
class Made:
    """A pool's rollouts as their node computed them: tokens int64 [R, N], log-probabilities float32 [R, N], states
    float32 [R, N, H]."""

    tokens_RN: npt.NDArray[np.int64]
    logprobs_RN: npt.NDArray[np.float32]
    states_RNH: npt.NDArray[np.float32]


class Maker:
    """Makes pools of one model and keeps them in a folder.

    Args:
        directory: a policy directory.
        tokens: sampled tokens of each rollout.
        wording: a prompt's text from its index and the system prompt.
    """

    def __init__(
        self,
        directory: Path,
        cache: Path,
        say: Callable[[str], None],
        tokens: int = TOKENS,
        wording: Callable[[int, str], str] | None = None,
    ) -> None:
        self.directory, self.tokens, self.say = directory, tokens, say
        self.wording = wording or chat
        self.tokenizer = load_tokenizer(directory)
        prompts = "\n".join(self.wording(i, system) for i in range(PROMPTS) for system in (HONEST_SYSTEM, OTHER_SYSTEM))
        digest = blake3(f"{FORMAT} {tokens}\n{prompts}".encode())
        digest.update(blake3().update_mmap(directory / "model.safetensors").digest())
        self.folder = cache / f"detection-{digest.hexdigest()[:16]}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def prompt(self, index: int, system: str = HONEST_SYSTEM) -> tuple[int, ...]:
        return tuple(prompt_ids(self.tokenizer, self.wording(index, system)))

    def seed(self, index: int, sample: int = 0) -> bytes:
        return sampling_seed(_RUN, _NONCE, index, sample)

    def made(self, pool: Pool) -> Made:
        """The pool's rollouts, from its file or made now.

        Raises:
            CouldNotRunError: the altered system prompt is not as long as it should be.
        """
        path = self.folder / f"{pool.name}.npz"
        if not path.exists():
            self.say(f"  sampling {pool.name}: {pool.rollouts} rollouts")
            self._make(pool, path)
        with np.load(path) as held:
            return Made(held["tokens"].astype(np.int64), held["logprobs"], held["states"])

    def has(self, pool: Pool) -> bool:
        return (self.folder / f"{pool.name}.npz").exists()

    def _make(self, pool: Pool, path: Path) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(pool.threads)
        try:
            requests = self._requests(pool)
            with self._node(pool) as model, noise_shifted(self._longer_by(pool, requests)):
                outputs = decode(model, requests, temperature=pool.temperature, stop_tokens=(), batch_rows=pool.batch)
        finally:
            torch.set_num_threads(before)
        save(
            path,
            tokens=np.asarray([out.tokens for out in outputs], dtype=np.int32),
            logprobs=np.stack([out.logprobs for out in outputs]),
            states=np.stack([out.states_NH for out in outputs]),
        )

    def _requests(self, pool: Pool) -> list[DecodeRequest]:
        system = {"prompt": OTHER_SYSTEM, "prompt-longer": LONGER_SYSTEM}.get(pool.kind, HONEST_SYSTEM)
        requests = []
        for i, index in enumerate(pool.prompts):
            prompt = self.prompt(index, system)
            seed = self.seed(index, pool.sample + i % pool.samples)
            requests.append(DecodeRequest(prompt, seed, self.tokens))
        return requests

    def _longer_by(self, pool: Pool, requests: Sequence[DecodeRequest]) -> int:
        """Tokens that this pool's prompts have more than the right ones, each of them."""
        more = {
            len(request.prompt) - len(self.prompt(index)) for request, index in zip(requests, pool.prompts, strict=True)
        }
        if len(more) != 1 or (more != {0} and pool.kind != "prompt-longer"):
            raise CouldNotRunError(f"the system prompt of {pool.kind} adds {sorted(more)} tokens; choose another")
        return more.pop()

    @contextmanager
    def _node(self, pool: Pool) -> Iterator[Model]:
        """The model that this pool's node samples from."""
        dtype = profile_of(pool.dtype).dtype
        directory, weights, attention = self.directory, dtype, pool.attention
        if pool.kind in STALE_KINDS:
            directory = self.folder / "before"
            if not (directory / "model.safetensors").exists():
                raise CouldNotRunError("the weights that are one step old are not made; run --part stale first")
            weights = torch.bfloat16 if pool.kind == "stale-bf16" else torch.float32
        if pool.kind == "fp8-kv":
            attention = "eager"  # its keys and values go through the modules that are watched here
        model = load_policy(directory, dtype, weights=weights, attention=attention).model
        with altered(model, pool.kind):
            yield model


@contextmanager
def noise_shifted(by: int) -> Iterator[None]:
    """Sample with the noise of positions that many tokens earlier."""
    usual = decoding.gumbel_noise

    def shifted(seeds: Sequence[bytes], positions: npt.NDArray[np.int64], vocabulary: int) -> Any:
        return usual(seeds, positions - by, vocabulary)

    decoding.gumbel_noise = shifted
    try:
        yield
    finally:
        decoding.gumbel_noise = usual


def chat(index: int, system: str) -> str:
    """Prompt `index` for SmolLM2; neighbours differ in form, then in topic."""
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{_question(index)}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def _question(index: int) -> str:
    return _FORMS[index % len(_FORMS)].format(_TOPICS[index // len(_FORMS) % len(_TOPICS)])


def save(path: Path, **arrays: npt.NDArray[Any]) -> None:
    """Write a file whole or not at all."""
    aside = path.with_name(f".{path.stem}.{os.getpid()}.npz")
    np.savez(aside, **arrays)
    aside.replace(path)


# --- ways to be dishonest --------------------------------------------------------------------------------------------


@contextmanager
def altered(model: Model, kind: str) -> Iterator[None]:
    """The model, changed in place as this kind of node would. Not undone but for hooks."""
    if kind in ("int8", "fp8", "int4"):
        rounded = {"int8": int8, "fp8": fp8, "int4": int4}[kind]
        with torch.no_grad():
            for parameter in linear_weights(model):
                parameter.copy_(rounded(parameter.float()))
    elif kind == "drop-layer":
        layers = model.model.layers
        middle = len(layers) // 2
        model.model.layers = torch.nn.ModuleList(layer for i, layer in enumerate(layers) if i != middle)
        for i, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = i
        model.config.num_hidden_layers = len(layers) - 1
    hooks = []
    if kind == "fp8-kv":
        for layer in model.model.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                hooks.append(projection.register_forward_hook(lambda _module, _inputs, out: fp8_values(out)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def linear_weights(model: Model) -> list[torch.Tensor]:
    """The matrices of all layers; embeddings and the head stay, as engines leave them."""
    return [module.weight.data for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)]


def int8(weight: torch.Tensor) -> torch.Tensor:
    """Symmetric, a scale for each output channel."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return torch.round(weight / scale) * scale


def int4(weight: torch.Tensor) -> torch.Tensor:
    """Symmetric, a scale for each 64 (or what divides the row) neighbours of a row."""
    group = next(size for size in (64, 32, 1) if weight.shape[1] % size == 0)
    parts = weight.reshape(weight.shape[0], -1, group)
    scale = parts.abs().amax(dim=2, keepdim=True).clamp_min(1e-12) / 7
    return (torch.round(parts / scale).clamp(-8, 7) * scale).reshape(weight.shape)


def fp8(weight: torch.Tensor) -> torch.Tensor:
    """e4m3, scaled so that each output channel uses its whole range."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def fp8_values(values: torch.Tensor) -> torch.Tensor:
    """e4m3 as it is, what engines do with keys and values. Keys are rounded before they are turned, not after."""
    return values.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(values.dtype)


# --- weights one step old --------------------------------------------------------------------------------------------

STEPS, LEARNING_RATE = 20, 1e-6
"""Real steps before the one that is missing, and AdamW's rate in all of them."""
_TASKS, _SAMPLES = 4, 4


def make_weights(maker: Maker, environment: Any, steps: int = STEPS) -> dict[str, float]:
    """`before` and `after` in the cache: a policy after `steps` real policy-gradient steps, and after one more.

    A step is real when its rewards differ within some group: answers of the policy itself to the environment's tasks,
    group advantages, the learner's own loss and optimiser. Returns numbers of the last step.

    Raises:
        CouldNotRunError: hardly any task has answers of different reward.
    """
    from trainer.config import LearnerSection
    from trainer.incoming import Sequence as Trained
    from trainer.incoming import TrainingBatch
    from trainer.update import Policy
    from verifier.model import completion_text

    after = maker.folder / "after"
    policy = load_policy(maker.directory)
    model, tokenizer = policy.model, policy.tokenizer
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    names = dict(model.named_parameters())
    storage = dict.fromkeys(names, torch.float32)
    learner = Policy(model, LearnerSection(learning_rate=LEARNING_RATE, warmup_steps=0), storage, 1.0)
    stop = policy.eos if environment.stop is None else tuple(prompt_ids(tokenizer, environment.stop))
    real, task, row = 0, 0, {}
    while real <= steps:
        if task > 50 * _TASKS * (steps + 1):
            raise CouldNotRunError("hardly any task has answers of different reward: nothing to learn from")
        tasks = [environment.task(task + i) for i in range(_TASKS)]
        task += _TASKS
        model.eval()
        requests = [
            DecodeRequest(
                tuple(prompt_ids(tokenizer, one.prompt)),
                sampling_seed(_RUN, _NONCE, one.index, sample),
                environment.max_new_tokens,
            )
            for one in tasks
            for sample in range(_SAMPLES)
        ]
        outputs = decode(model, requests, temperature=1.0, stop_tokens=stop)
        sequences = []
        for i, (request, out) in enumerate(zip(requests, outputs, strict=True)):
            one = tasks[i // _SAMPLES]
            text = completion_text(tokenizer, out.tokens, stop)
            reward = environment.score(one, text, out.tokens[-1] in stop)
            sequences.append(Trained(bytes([i // _SAMPLES]), request.prompt, out.tokens, out.logprobs, reward, 0))
        if all(len({s.reward for s in sequences if s.group == bytes([g])}) == 1 for g in range(_TASKS)):
            continue
        if real == steps:
            save_policy(maker.directory, model, maker.folder / "before")
        row = learner.learn(TrainingBatch(real, tuple(sequences), frozenset()))
        real += 1
        maker.say(f"  step {real} of {steps + 1}: reward {row['reward_mean']:.2f}, gradient {row['grad_norm']:.3g}")
    save_policy(maker.directory, model, after)
    return {"steps": float(real), "grad_norm": float(row["grad_norm"]), "reward_mean": float(row["reward_mean"])}


def save_policy(source: Path, model: Model, out: Path) -> None:
    """A policy directory in float32 beside the source's configuration and tokenizer."""
    from safetensors.torch import save as to_bytes

    out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        write_atomic(out / name, (source / name).read_bytes())
    tensors = {name: one.detach().float().contiguous().clone() for name, one in model.named_parameters()}
    write_atomic(out / "model.safetensors", to_bytes(tensors))


# --- what is made of other rollouts ----------------------------------------------------------------------------------


def best_of(made: Made, samples: int) -> list[int]:
    """Of each `samples` neighbours the one with the highest log-probability: what a node that knows a reward would send
    instead of the first."""
    totals = made.logprobs_RN.sum(axis=1).reshape(-1, samples)
    return [samples * row + int(best) for row, best in enumerate(totals.argmax(axis=1))]


def take(made: Made, rows: Sequence[int]) -> Made:
    """Some of its rollouts."""
    rows = list(rows)
    return dataclasses.replace(
        made, tokens_RN=made.tokens_RN[rows], logprobs_RN=made.logprobs_RN[rows], states_RNH=made.states_RNH[rows]
    )


def smollm2_directory() -> Path:
    return smollm2.export()
