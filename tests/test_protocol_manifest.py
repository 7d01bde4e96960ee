"""The run manifest: what a stranger may not put into one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.envelope import seal
from protocol.errors import ManifestError
from protocol.limits import MAX_MODEL_FILE_BYTES
from protocol.manifest import MANIFEST_KIND, ModelFile, open_manifest, run_id_of
from tests.ledger_builder import START_MS, identity, make_manifest


def signed(*files: ModelFile) -> bytes:
    """A manifest with these model files, validly signed by its own root."""
    manifest = make_manifest(model=replace(make_manifest().model, files=files))
    return seal(identity("root"), MANIFEST_KIND, manifest, run=run_id_of(manifest), sequence=1, issued_at=START_MS).raw


@pytest.mark.parametrize(
    "name",
    [
        "../../.bashrc",
        "/etc/cron.d/x.json",
        "..",
        ".",
        "",
        "a/b.json",
        "a\\b.json",
        ".hidden.json",
        "config.json\n",
        "con\0fig.json",
        "model.safetensors",
        "publication.hw",
        "pytorch_model.bin",
        "modeling_evil.py",
        "config.json/../../x.json",
    ],
)
def test_a_model_file_is_one_plain_name_of_a_harmless_kind(name: str) -> None:
    """Nodes and auditors write files under these names: one level up, and a stranger owns the machine."""
    with pytest.raises(ManifestError, match="plain name"):
        open_manifest(signed(ModelFile(name, 1, bytes(32))))


def test_model_files_are_named_once_and_bounded() -> None:
    with pytest.raises(ManifestError, match="twice"):
        open_manifest(signed(ModelFile("config.json", 1, bytes(32)), ModelFile("Config.json", 1, bytes(32))))
    with pytest.raises(ManifestError, match="bound"):
        open_manifest(signed(ModelFile("config.json", MAX_MODEL_FILE_BYTES + 1, bytes(32))))
    names = ["config.json", "tokenizer.json", "merges.txt", "chat_template.jinja", "tokenizer.model"]
    opened = open_manifest(signed(*(ModelFile(name, 1, bytes(32)) for name in names)))
    assert [file.name for file in opened.manifest.model.files] == names
