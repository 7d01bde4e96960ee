"""Makes the tiny base model that every demo starts from.

    python -m trainer.tiny_base trainer/data/tiny          the checked-in one; about 90 s of one core

A 330K-parameter Qwen3 with a real Hugging Face configuration, a real fast tokenizer (one character a token) and a
safetensors file, trained on the mixture of six transforms (`trainer.mixture`) at a constant learning rate. The rate
only falls in the live SFT at the start of a run (`[sft]` in run.toml): that is the rest of the same training, and the
loss visibly drops there.

Not covered: the live stage (`trainer.sft`) and RL (`trainer.learner`). Another CPU gives other low bits: the checked-in
file is the reference, not this command's output.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from trainer import sft

PAD, EOS = 0, 1
CHARACTERS = '0123456789abcdefghijklmnopqrstuvwxyz+-*/=()<>:;,. ?|!"#$%&@[]_'
"""Order is token id - 2. Changing it changes what every stored token means: a new base and a new run."""
SEED = 0
STEPS = 1800
"""Enough that every transform is in there; fewer, and RL has too little to elicit (0.6, not 0.8, at step 110)."""
BATCH, LEARNING_RATE, WARMUP = 64, 3e-3, 50
_NEVER = 1_000_000
"""Where the linear decay would end: the base is trained at a constant rate."""


def configuration() -> Any:
    """The 330K-parameter Qwen3."""
    return transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="float32",
    )


def character_tokenizer() -> tokenizers.Tokenizer:
    """One character, one token. A character outside CHARACTERS is an error, never silently dropped."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {c: i + 2 for i, c in enumerate(CHARACTERS)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary))
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def write_model(model: Any, out: Path) -> None:
    """Write config.json, tokenizer.json, tokenizer_config.json and model.safetensors (names sorted)."""
    out.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(out)
    character_tokenizer().save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "model_max_length": 256,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    tensors = {name: t.contiguous() for name, t in sorted(model.state_dict().items()) if name != "lm_head.weight"}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)


def make(
    out: Path,
    seed: int = SEED,
    steps: int = STEPS,
    report: Callable[[sft.Progress], None] = lambda _p: None,
) -> None:
    """Train the base and write it to `out`."""
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(configuration())
    tokenizer = character_tokenizer()
    schedule = sft.Schedule(steps=steps, batch_size=BATCH, learning_rate=LEARNING_RATE, warmup=WARMUP, total=_NEVER)
    sft.supervise(model, lambda text: tokenizer.encode(text).ids, EOS, sft.mixture_draw, schedule, seed, report)
    write_model(model, out)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.tiny_base", description="Make the tiny base model.")
    parser.add_argument("out", type=Path, help="folder to write, for example trainer/data/tiny")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    def report(progress: sft.Progress) -> None:
        if progress.step % 50 == 0:
            sys.stderr.write(f"step {progress.step}  loss {progress.loss:.3f}  {progress.cpu_seconds:.0f} CPU-s\n")

    make(args.out, args.seed, args.steps, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
