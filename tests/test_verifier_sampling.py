"""Philox, the noise made of it, the choice and the margin: vectors first, then what they are for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.seeds import sampling_seed
from tests.back_ends import back_end  # noqa: F401
from verifier.errors import VerifierError
from verifier.logprobs import token_logprobs
from verifier.philox import philox4x32, word_rows
from verifier.sampling import choose, gumbel_noise, margins, replayed_margins

FULL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_known_answers_of_random123(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    """philox4x32 with 10 rounds, from `kat_vectors` of the Random123 distribution."""
    assert tuple(int(w) for w in philox4x32(counter, key)) == words  # type: ignore[arg-type]


def plain_noise(seed: bytes, position: int, token: int) -> float:
    """The definition of RULES 4, one value at a time."""
    key = int.from_bytes(seed[:4], "big"), int.from_bytes(seed[4:8], "big")
    words = philox4x32((position & FULL, position >> 32, token // 4, 0), key)
    u = (int(words[token % 4]) + 0.5) / 2**32
    return -math.log(-math.log1p(-u))


@settings(max_examples=40, deadline=None)
@given(
    seeds=st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=4),
    first=st.one_of(st.integers(0, 300), st.integers(2**32 - 3, 2**32 + 3)),
    vocabulary=st.sampled_from([1, 3, 4, 61, 64, 1000]),
)
def test_noise_is_the_plain_definition_for_every_seed_and_position(
    seeds: list[bytes], first: int, vocabulary: int
) -> None:
    positions = np.arange(len(seeds)) + first
    noise = gumbel_noise(seeds, positions, vocabulary)
    assert noise.shape == (len(seeds), vocabulary) and noise.dtype == np.float32
    for row, (seed, position) in enumerate(zip(seeds, positions.tolist(), strict=True)):
        for token in {0, vocabulary // 2, vocabulary - 1}:
            assert noise[row, token] == pytest.approx(plain_noise(seed, position, token), abs=2e-6, rel=2e-7)


def test_a_verifier_can_jump_to_any_position() -> None:
    """Rows do not depend on their neighbours, nor on how the work is cut into tiles."""
    seeds = [sampling_seed(bytes(32), bytes(32), task, 0) for task in range(70)]
    positions = np.arange(70) * 3
    for vocabulary in (64, 49_152):
        some = seeds if vocabulary == 64 else seeds[:3]
        whole = gumbel_noise(some, positions[: len(some)], vocabulary)
        for row in range(0, len(some), 7):
            alone = gumbel_noise([some[row]], [positions[row]], vocabulary)
            assert np.array_equal(alone[0], whole[row])


def test_the_vector_of_the_specification() -> None:
    seed = sampling_seed(bytes(range(32)), bytes(32), 7, 3)
    assert seed.hex() == SEED
    got = gumbel_noise([seed, seed], [0, 12], 6)
    np.testing.assert_allclose(got, np.asarray(NOISE, dtype=np.float32), rtol=2e-7, atol=1e-7)


SEED = "5632a6cbcbe128ff6846605c87e4e3c79e3f0b332433acbdbe977f91d1e7ff7a"
NOISE = [
    [-0.310071975, -0.248063415, 0.204246402, 0.751253963, -0.907313168, -0.105684832],
    [4.42731571, -0.816467941, -0.394115835, -0.387141794, 0.630130827, 1.56833231],
]


@pytest.mark.parametrize("blocks", [1, 3, 12_288, 40_000])
def test_words_of_rows_are_philox_s(blocks: int) -> None:
    rng = np.random.default_rng(blocks)
    keys = rng.integers(0, 2**32, (3, 2)).astype(np.uint64)
    positions = np.asarray([0, 2**32 - 1, 2**40 + 7], dtype=np.uint64)
    words = word_rows(keys, positions, blocks)
    for row, position in enumerate(positions.tolist()):
        counter = (position & FULL, position >> 32, np.arange(blocks), 0)
        expected = philox4x32(counter, (int(keys[row, 0]), int(keys[row, 1])))
        assert np.array_equal(words[row], np.stack(expected, axis=1).reshape(-1))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocabulary=st.sampled_from([1, 2, 5, 61, 1000, 50_001]),
    scale=st.sampled_from([0.0, 0.3, 3.0, 30.0, 3e3, 1e5]),
    temperature=st.sampled_from([1.0, 0.6, 2.5]),
)
def test_margins_without_most_noise_are_those_with_all_of_it(
    seed: int, vocabulary: int, scale: float, temperature: float
) -> None:
    rng = np.random.default_rng(seed)
    count = 1 if vocabulary > 10_000 else 5
    logits = torch.from_numpy(rng.standard_normal((count, vocabulary), dtype=np.float32) * np.float32(scale))
    seeds, positions = [rng.bytes(32) for _ in range(count)], rng.integers(0, 2**33, count)
    noise = gumbel_noise(seeds, positions, vocabulary)
    forced = choose(logits, temperature, noise)
    unlikely = logits.argmin(dim=-1)  # what passes is most of the row
    for tokens in (forced, torch.from_numpy(rng.integers(0, vocabulary, count)), unlikely):
        expected = margins(logits, temperature, noise, tokens)
        found = replayed_margins(logits, temperature, seeds, positions, tokens)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert replayed_margins(logits, temperature, seeds, positions, forced).max() == 0


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 3e38, 1e4, -1e4, -3e38])
@pytest.mark.parametrize("where", [7, slice(None)])
def test_margins_of_logits_that_are_no_numbers_are_as_before(odd: float, where: int | slice) -> None:
    logits = torch.randn(3, 50)
    logits[1, where] = odd
    seeds, positions, tokens = [bytes([i]) * 32 for i in range(3)], np.arange(3), torch.tensor([0, 7, 9])
    noise = gumbel_noise(seeds, positions, 50)
    for claimed in (tokens, torch.tensor([1, 2, 3])):
        expected = margins(logits, 1.0, noise, claimed)
        found = replayed_margins(logits, 1.0, seeds, positions, claimed)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel_noise([bytes([i]) * 32 for i in range(64)], np.zeros(64), 4096).astype(np.float64)
    assert noise.mean() == pytest.approx(0.5772, abs=0.01) and noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert np.isfinite(noise).all() and noise.max() < 22.3


def test_seeded_choices_follow_the_softmax_and_have_no_margin() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    count = 20_000
    noise = gumbel_noise([i.to_bytes(8, "big") * 4 for i in range(count)], np.arange(count), 5)
    for temperature in (1.0, 0.7):
        chosen = choose(logits.expand(count, 5), temperature, noise)
        share = torch.bincount(chosen, minlength=5) / count
        torch.testing.assert_close(share, torch.softmax(logits / temperature, 0), atol=0.012, rtol=0)
        assert margins(logits.expand(count, 5), temperature, noise, chosen).max() == 0.0
        others = margins(logits.expand(count, 5), temperature, noise, (chosen + 1) % 5)
        assert others.min() > 0.0
    assert not torch.equal(choose(logits.expand(count, 5), 1.0, noise), choose(logits.expand(count, 5), 0.7, noise))


def test_equal_scores_go_to_the_lowest_id() -> None:
    assert choose(torch.zeros(1, 8), 1.0, torch.zeros(1, 8)).item() == 0


def test_what_cannot_be_sampled_is_refused() -> None:
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(VerifierError, match="temperature"):
            choose(torch.zeros(1, 4), temperature, torch.zeros(1, 4))
        with pytest.raises(VerifierError, match="temperature"):
            replayed_margins(torch.zeros(1, 4), temperature, [bytes(32)], [0], torch.zeros(1, dtype=torch.int64))
    with pytest.raises(VerifierError, match="position"):
        gumbel_noise([bytes(32)], [1, 2], 4)


def test_log_probabilities_are_of_the_raw_logits_and_differentiable() -> None:
    logits = torch.randn(2, 3, 11, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, 11, (2, 3))
    got = token_logprobs(logits, tokens, 0.5)
    want = torch.log_softmax(logits.float() / 0.5, -1).gather(-1, tokens[..., None])[..., 0]
    assert got.shape == tokens.shape and got.dtype == torch.float32
    torch.testing.assert_close(got, want)
    got.sum().backward()
    assert logits.grad is not None and logits.grad.abs().sum() > 0
