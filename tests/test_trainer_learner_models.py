"""The models a run starts from: the tiny base as it is checked in, its corpus, stage one, and SmolLM2's export."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import trainer
from protocol.errors import UsageError
from protocol.files import cache_directory
from shardcast.layout import layout_hash, layout_of_safetensors
from trainer import mixture, sft, smollm2, tiny_base
from verifier.model import load_policy, prompt_ids

TINY = Path(trainer.__file__).parent / "data" / "tiny"


def test_the_tiny_base_is_an_ordinary_hugging_face_model() -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert sum(p.numel() for p in model.parameters()) == 329_568
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ours = load_policy(TINY)
    ids = torch.tensor([prompt_ids(ours.tokenizer, "abcde=edcba")])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, ours.model(ids).logits)
    assert ours.eos == (1,)


def test_one_character_is_one_token_both_ways() -> None:
    plain = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(TINY)
    assert (auto.pad_token_id, auto.eos_token_id, len(auto)) == (0, 1, 64)
    rng = random.Random(0)
    for _ in range(50):
        text = "".join(rng.choice(tiny_base.CHARACTERS) for _ in range(rng.randint(1, 30)))
        ids = plain.encode(text, add_special_tokens=False).ids
        assert len(ids) == len(text)
        assert auto(text, add_special_tokens=False)["input_ids"] == ids
        assert plain.decode(ids) == text
        assert auto.decode(ids) == text
    assert plain.decode([12, 13, 1]) == "ab"
    with pytest.raises(Exception, match="UNK"):
        plain.encode("é")


def test_the_command_makes_what_is_checked_in_except_for_the_training(tmp_path: Path) -> None:
    tiny_base.make(tmp_path / "base", steps=2)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "base" / name).read_bytes() == (TINY / name).read_bytes(), name
    layouts = [layout_of_safetensors(path / "model.safetensors") for path in (tmp_path / "base", TINY)]
    assert layout_hash(layouts[0]) == layout_hash(layouts[1])
    assert "python -m trainer.tiny_base" in (tiny_base.__doc__ or "")


def test_the_corpus_holds_six_transforms_and_does_not_say_which() -> None:
    rng = random.Random(1)
    examples = [mixture.draw(rng) for _ in range(1200)]
    assert {e.transform for e in examples} == set(mixture.TRANSFORMS)
    for example in examples:
        word = example.prompt[:-1]
        assert example.prompt == f"{word}="
        assert 4 <= len(word) <= 7
        assert mixture.TRANSFORMS[example.transform](word) == example.answer
    assert mixture.TRANSFORMS["reverse"]("abcd") == "dcba"
    assert mixture.TRANSFORMS["sort"]("cab") == "abc"
    assert mixture.TRANSFORMS["reverse-sort"]("cab") == "cba"
    assert mixture.TRANSFORMS["rotate"]("abcd") == "bcda"
    assert mixture.TRANSFORMS["first-letter"]("abc") == "aaa"


def _supervise(steps: int, cpu_seconds: float = 0.0) -> tuple[list[sft.Progress], torch.Tensor]:
    torch.set_num_threads(1)
    policy = load_policy(TINY)
    for parameter in policy.model.parameters():
        parameter.requires_grad_(True)
    seen: list[sft.Progress] = []
    schedule = sft.Schedule(steps, 16, 1e-3, cpu_seconds)
    sft.supervise(
        policy.model, lambda text: prompt_ids(policy.tokenizer, text), 1, sft.mixture_draw, schedule, 3, seen.append
    )
    return seen, policy.model.model.norm.weight.detach()


def test_stage_one_is_the_same_twice_and_ends_at_its_cpu_limit() -> None:
    first, weights = _supervise(8)
    second, again = _supervise(8)
    assert [p.loss for p in first] == [p.loss for p in second]
    assert torch.equal(weights, again)
    assert len(_supervise(10_000, cpu_seconds=0.3)[0]) < 1000


def test_the_learning_rate_rises_then_falls_to_the_schedules_end() -> None:
    schedule = sft.Schedule(100, 64, 1.0, warmup=10, total=200)
    assert schedule.rate(0) == pytest.approx(0.1)
    assert schedule.rate(9) == pytest.approx(1 - 9 / 200)
    assert schedule.rate(99) == pytest.approx(1 - 99 / 200)
    assert sft.Schedule(100, 64, 1.0).rate(99) == pytest.approx(0.02)


def test_a_missing_wheel_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "WHEEL", "headwater-no-such-wheel")
    with pytest.raises(UsageError, match="make install"):
        smollm2.export()


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "headwater"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_directory() == Path.home() / ".cache" / "headwater"


@pytest.mark.heavy
def test_smollm2_is_unpacked_once_and_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []
    place = smollm2.export(said.append)
    assert smollm2.export(said.append) == place
    assert len(said) == 1
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    settings = json.loads((place / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"]
    assert {t.dtype for t in layout_of_safetensors(place / "model.safetensors").tensors} == {"BF16"}
    policy = load_policy(place)
    ids = prompt_ids(policy.tokenizer, "2+5=7\n8+4=12\n3+4=")
    with torch.no_grad():
        best = int(policy.model(torch.tensor([ids])).logits[0, -1].argmax())
    assert policy.tokenizer.decode([best]).strip().isdigit()
