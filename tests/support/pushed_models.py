"""Exported models to push: small ones of transformers that lie in the tests, with a receipt."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from olm_data.model_receipt import FileProof, ModelClaim, ModelReceipt, Verified
from olm_data.storage.destination import RECORD

FROZEN = Path(__file__).resolve().parents[1] / "olm_train/extensions/hf/frozen"
CARD = "---\nlibrary_name: transformers\n---\n# A model\n"


def exported_model(folder: Path, family: str = "llama", checkpoint: str = "c" * 64) -> Path:
    """Make a folder as an export for transformers leaves it, card and receipt included."""
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FROZEN / family / name, folder / name)
    (folder / "README.md").write_text(CARD)
    receipt(folder, checkpoint)
    return folder


def receipt(folder: Path, checkpoint: str = "c" * 64) -> None:
    """Write the receipt of the files that a folder holds."""
    files = {
        path.name: FileProof(len(data := path.read_bytes()), hashlib.sha256(data).hexdigest())
        for path in sorted(folder.iterdir())
        if path.name != RECORD
    }
    made = ModelReceipt(
        claim=ModelClaim(
            checkpoint=checkpoint,
            dtype="bfloat16",
            shard_bytes=5 * 10**9,
            tied_head=False,
            template=None,
            context=32,
        ),
        model_class="LlamaForCausalLM",
        parameters=7,
        step=3,
        lock="",
        datasets={},
        tokenizer=None,
        probe=None,
        files=files,
        tensors={},
        verified=Verified(
            tensors_read_by="safetensors 1", tokenizer_read_by=(), model=None, not_compared=("all",)
        ),
    )
    (folder / RECORD).write_bytes(made.encode())
