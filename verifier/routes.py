"""Which experts a mixture-of-experts model used, token by token: recorded while decoding, checked and replayed later.

A router takes the k experts of highest score. Where the k-th and the next one are level within rounding, two honest
machines may take different ones, and from there on their states differ by far more than rounding. So the node says
which experts it used, and the verifier's own forward pass uses the same ones, with weights from its own router logits.
A claimed choice is believed only where it is the verifier's own choice but for a margin: its *shortfall*, by how much
an expert left out beats one that was taken, may be at most the run's `route_margin`.

    scores       Qwen3-MoE: router logits. GLM4-MoE: sigmoid(logits) + correction bias, what its router ranks by
    groups       GLM4-MoE may first choose groups of experts by the sum of their two best scores. The shortfall is the
                 smallest over all choices of groups that hold the claimed experts: which of two level groups was
                 taken can't always be seen from the experts
    first choice experts other than the router's own, level or not, are another choice; those are counted (`Replay`)
    positions    every token that went through the model: the whole prompt, and the sampled tokens but the last. A
                 prompt's route changes the keys and values that all later tokens read, as much as a token's own does
    wire form    position by position, layer by layer, k expert ids rising; u8 up to 256 experts, else u16 little-endian

Transformers' modules stay as they are: a forward hook on each router reads, or replaces, what it returns, and is taken
off when the pass is over. `tests/test_verifier_routes.py` fails when a router returns something else than is assumed.

Not covered: reading rollouts in blocks (`replay`), the check (`checks.routes`), routers that depend on other tokens.

Shape suffixes: T tokens (rows times columns), B rows, L columns, P positions, Y expert layers, K experts per token,
E experts, G groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from protocol.manifest import Routing
from verifier.errors import PolicyError, RouteError

MAX_GROUP_CHOICES = 128
"""Ways to choose groups that are tried for each token. Bounds the cost of a hostile configuration: 8 groups of which 4
are taken have 70."""

Ids = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


class _Kind(Protocol):
    """How one family's router turns logits into a choice."""

    groups: int
    taken: int
    """Groups that a token's experts come from."""

    def scores(self, logits_TE: torch.Tensor) -> torch.Tensor:
        """What experts are ranked by, float32."""
        ...

    def weights(self, logits_TE: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
        """What each chosen expert's output is multiplied with."""
        ...


class _Softmax:
    """Qwen3-MoE: ranked by logit, weighted by softmax over all experts."""

    groups = taken = 1

    def __init__(self, gate: Any) -> None:
        self._gate = gate

    def scores(self, logits_TE: torch.Tensor) -> torch.Tensor:
        return logits_TE.float()

    def weights(self, logits_TE: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
        weights_TK = torch.softmax(logits_TE, dim=-1, dtype=torch.float32).gather(-1, chosen_TK)
        if self._gate.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK.to(logits_TE.dtype)


class _Sigmoid:
    """GLM4-MoE: ranked by sigmoid plus a correction bias inside the best groups, weighted by the sigmoid alone."""

    def __init__(self, gate: Any) -> None:
        self._gate = gate
        self.groups, self.taken = int(gate.num_group), int(gate.topk_group)

    def scores(self, logits_TE: torch.Tensor) -> torch.Tensor:
        scores_TE: torch.Tensor = logits_TE.float().sigmoid() + self._gate.e_score_correction_bias
        return scores_TE

    def weights(self, logits_TE: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
        weights_TK = logits_TE.sigmoid().gather(-1, chosen_TK)
        if self._gate.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return weights_TK * float(self._gate.routed_scaling_factor)


_KINDS: dict[str, Callable[[Any], _Kind]] = {"Qwen3MoeTopKRouter": _Softmax, "Glm4MoeTopkRouter": _Sigmoid}
"""Router classes of Transformers whose choice is known here."""

_DENSE = ("Qwen3MLP", "LlamaMLP", "Qwen3MoeMLP", "Glm4MoeMLP")
"""Classes of layers that every token goes through whole. What is neither of these nor has a router above may choose in
a way nobody checks: taken for dense, its choices would be the node's."""


class Experts:
    """The expert layers of one model, in order.

    Attributes: `routing`, the shape that the manifest names.
    """

    def __init__(self, gates: list[Any]) -> None:
        self._gates = gates
        self._kinds = [_KINDS[type(gate).__name__](gate) for gate in gates]
        shapes = {(int(gate.num_experts), int(gate.top_k)) for gate in gates}
        groups = {(kind.groups, kind.taken) for kind in self._kinds}
        if len(shapes) != 1 or len(groups) != 1:
            raise PolicyError("the layers of this model have different numbers of experts")
        ((experts, per_token),), ((count, taken),) = shapes, groups
        self.routing = Routing(len(gates), experts, per_token)
        if not (1 <= per_token <= experts <= 1 << 16 and len(gates) < 1 << 16):
            raise PolicyError(f"{per_token} of {experts} experts per token can't be checked")
        if not (1 <= taken <= count <= experts and experts % count == 0 and taken * (experts // count) >= per_token):
            raise PolicyError(f"{experts} experts in {count} groups, of which {taken} are taken, can't be checked")
        if math.comb(count, taken) > MAX_GROUP_CHOICES or (count > 1 and experts // count < 2):
            raise PolicyError(f"{taken} of {count} groups of experts are more choices than a verifier tries")

    @staticmethod
    def of(model: Any) -> Experts | None:
        """Those of a Transformers `...ForCausalLM`; None when its layers are all dense.

        Raises:
            PolicyError: a layer that is neither dense nor has a router that is known here; experts, or groups of them,
                in a number that can't be checked.
        """
        known = []
        for number, layer in enumerate(model.model.layers):
            mlp = getattr(layer, "mlp", None)
            gate = getattr(mlp, "gate", None)
            if type(gate).__name__ in _KINDS:
                known.append(gate)
            elif gate is not None or type(mlp).__name__ not in _DENSE:
                router = "no feed-forward layer" if mlp is None else type(mlp).__name__
                router += "" if gate is None else f" with the router {type(gate).__name__}"
                raise PolicyError(
                    f"layer {number} of {type(model).__name__} has {router}, of which this software knows no choice of "
                    f"experts (it knows {', '.join(_KINDS)}): nothing would hold a node to it. Use another model, or a "
                    "release that knows it"
                )
        return Experts(known) if known else None

    @property
    def _dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.routing.experts <= 1 << 8 else "<u2")

    def empty(self, *shape: int) -> Ids:
        """Ids of so many positions, uninitialised: [*shape, Y, K]."""
        ids: Ids = np.empty((*shape, self.routing.layers, self.routing.per_token), self._dtype)
        return ids

    def encode(self, ids_PYK: npt.NDArray[Any]) -> bytes:
        """The wire form of a rollout's routes, in whatever order each token's experts are."""
        return np.sort(ids_PYK, axis=-1).astype(self._dtype).tobytes()

    def decode(self, raw: bytes, positions: int) -> Ids:
        """A rollout's routes [P, Y, K] from their wire form, without a copy.

        Raises:
            RouteError: not exactly that many positions, an id out of range, or ids that don't rise (twice the same
                among them). Costs as much as reading the bytes once.
        """
        if len(raw) != positions * self.routing.bytes_per_position:
            raise RouteError(f"{len(raw)} bytes of routes for {positions} positions of {self.routing}")
        ids_PYK: Ids = np.frombuffer(raw, self._dtype).reshape(-1, self.routing.layers, self.routing.per_token)
        if not (ids_PYK < self.routing.experts).all() or not (ids_PYK[..., 1:] > ids_PYK[..., :-1]).all():
            raise RouteError(f"routes name experts above {self.routing.experts - 1}, twice, or out of order")
        return ids_PYK

    def lead(self, scores_PYE: torch.Tensor, chosen_PYK: npt.NDArray[Any]) -> torch.Tensor:
        """By how much each choice that is the scores' own beats the next best one, float32 [P, Y]; below 0 for others.

        Where it is 0 experts are level: another machine may choose otherwise.
        """
        kind, chosen = self._kinds[0], torch.from_numpy(chosen_PYK.astype(np.int64))
        return torch.stack(
            [
                -shortfalls(scores_PYE[:, layer], chosen[:, layer], kind.groups, kind.taken)
                for layer in range(self.routing.layers)
            ],
            dim=1,
        )

    @contextmanager
    def recorded(self) -> Iterator[Recording]:
        """Note what the routers choose in the passes inside."""
        recording = Recording(self)
        with self._hooked(recording.note):
            yield recording

    @contextmanager
    def scored(self) -> Iterator[list[torch.Tensor]]:
        """Collect what experts are ranked by in one pass inside: [T, E] a layer, in order."""
        scores: list[torch.Tensor] = []

        def collect(layer: int, output: Any) -> None:
            scores.append(self._kinds[layer].scores(output[0].flatten(0, -2)))

        with self._hooked(collect):
            yield scores

    @contextmanager
    def replayed(
        self, claimed_BLYK: npt.NDArray[Any], real_BL: npt.NDArray[np.bool_], margin: float
    ) -> Iterator[Replay]:
        """Make one pass inside use claimed experts where they fall short by at most `margin`, else the model's own.

        A choice beyond the margin condemns its rollout and is not followed: experts of no weight at all could make the
        states something that is no number.

        Args:
            claimed_BLYK: ids below the number of experts; anything where `real_BL` is False (padding).
        """
        replay = Replay(self, claimed_BLYK, real_BL, margin)
        with self._hooked(replay.choose):
            yield replay

    @contextmanager
    def _hooked(self, visit: Callable[[int, Any], Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for layer, gate in enumerate(self._gates):
                handle = gate.register_forward_hook(lambda module, inputs, output, layer=layer: visit(layer, output))
                stack.callback(handle.remove)
            yield


class Recording:
    """The experts of the newest forward pass."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self._chosen: list[torch.Tensor | None] = [None] * experts.routing.layers

    def note(self, layer: int, output: Any) -> None:
        self._chosen[layer] = output[2]

    def take(self, rows: int) -> Ids:
        """Ids [B, L, Y, K] of the pass that just ended over `rows` rows; each token's rise."""
        chosen = [one for one in self._chosen if one is not None]
        ids_TYK = torch.stack(chosen, dim=1).sort(dim=-1).values.to(torch.int32).numpy()
        self._chosen = [None] * len(self._chosen)
        ids = self._experts.empty(rows, len(ids_TYK) // rows)
        ids[...] = ids_TYK.reshape(ids.shape)
        return ids


class Replay:
    """One pass over claimed experts, by how much each claim falls short, and how many are not the model's own."""

    def __init__(
        self, experts: Experts, claimed_BLYK: npt.NDArray[Any], real_BL: npt.NDArray[np.bool_], margin: float
    ) -> None:
        self._experts, self._margin = experts, margin
        self._rows = len(claimed_BLYK)
        self._claimed_TYK = torch.from_numpy(claimed_BLYK).flatten(0, 1)
        self._real_T = torch.from_numpy(real_BL).flatten()
        self._worst_T = torch.zeros(len(self._real_T))
        self._layer_T = torch.zeros(len(self._real_T), dtype=torch.long)
        self._others_T = torch.zeros(len(self._real_T), dtype=torch.long)

    def choose(self, layer: int, output: Any) -> Any:
        """What the router of `layer` returns instead of `output` (logits, weights, experts)."""
        kind = self._experts._kinds[layer]
        logits, _, own_TK = output
        logits_TE = logits.flatten(0, -2)
        claimed_TK = self._claimed_TYK[:, layer].long()
        short_T = shortfalls(kind.scores(logits_TE), claimed_TK, kind.groups, kind.taken)
        follow_T = self._real_T & (short_T <= self._margin)
        self._others_T += self._real_T & (own_TK.sort(dim=-1).values != claimed_TK).any(dim=-1)
        larger_T = self._real_T & ~(short_T <= self._worst_T)  # what is no number is larger than any
        self._worst_T[larger_T] = short_T[larger_T].nan_to_num(nan=math.inf)
        self._layer_T[larger_T] = layer
        chosen_TK = torch.where(follow_T[:, None], claimed_TK, own_TK)
        return logits, kind.weights(logits_TE, chosen_TK), chosen_TK

    def not_first(self) -> npt.NDArray[np.int64]:
        """Of each row how many claims, over its columns and the layers, name other experts than the model's own [B]."""
        others_B: npt.NDArray[np.int64] = self._others_T.reshape(self._rows, -1).sum(dim=1).numpy()
        return others_B

    def worst(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Of each row the largest shortfall [B], 0 where all are the model's own choices and infinite where one is none
        at all, with the column and the layer it comes first at."""
        worst_BL, layer_BL = self._worst_T.reshape(self._rows, -1), self._layer_T.reshape(self._rows, -1)
        largest = worst_BL.max(dim=1)
        layer_B = layer_BL.gather(1, largest.indices[:, None])[:, 0]
        return largest.values.numpy(), largest.indices.numpy(), layer_B.numpy()


def shortfalls(scores_TE: torch.Tensor, chosen_TK: torch.Tensor, groups: int = 1, taken: int = 1) -> torch.Tensor:
    """By how much the best expert left out beats the worst one chosen, float32 [T]; 0 or less: the choice is right.

    With groups: of all choices of `taken` groups that hold the chosen experts the one that is nearest to right, each
    measured by the larger of two, what an expert left out inside has more and what a group left out has more.
    Infinite when no choice of groups holds them.
    """
    lowest_T = scores_TE.gather(-1, chosen_TK).amin(-1)
    left_TE = scores_TE.scatter(-1, chosen_TK, -math.inf)
    if groups == 1:
        return left_TE.amax(-1) - lowest_T
    size = scores_TE.shape[-1] // groups
    left_TG = left_TE.reshape(-1, groups, size).amax(-1)
    strength_TG = scores_TE.reshape(-1, groups, size).topk(2, dim=-1).values.sum(-1)
    used_TG = torch.zeros_like(left_TG, dtype=torch.bool).scatter(-1, chosen_TK // size, value=True)
    smallest_T = torch.full_like(lowest_T, math.inf)
    for inside in itertools.combinations(range(groups), taken):
        outside = [group for group in range(groups) if group not in inside]
        short_T = left_TG[:, inside].amax(-1) - lowest_T
        if outside:
            beaten_T = strength_TG[:, outside].amax(-1) - strength_TG[:, inside].amin(-1)
            short_T = torch.maximum(short_T, beaten_T).masked_fill(used_TG[:, outside].any(-1), math.inf)
        smallest_T = torch.minimum(smallest_T, short_T)
    return smallest_T
