"""Short runs whose last checkpoint is exported, and what lies in an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.runs import build_trainer

from olm_data.model_receipt import ModelReceipt
from olm_data.storage.destination import RECORD
from olm_train.checkpoint.load import Checkpoint, open_checkpoint
from olm_train.distributed.world import World

OLMO2 = (
    "d_model: 32, n_layers: 2, n_heads: 4, feed_forward: {hidden_size: 48}, block: reordered_norm, "
    "attention: {qk_norm: full}"
)
_SIZES = "d_model: 32, n_layers: 2, n_heads: 4, init_std: 0.2"
_EXPERTS = "name: moe, n_experts: 6, top_k: 2, hidden_size: 24"
OLMOE = (
    f"{_SIZES}, attention: {{qk_norm: full}}, "
    f"feed_forward: {{{_EXPERTS}, balance: {{name: aux}}, capacity_factor: 1.0}}"
)
QWEN3_MOE = (
    f"{_SIZES}, attention: {{qk_norm: head}}, vocab_multiple: 64, head: {{tied: true}}, "
    f"feed_forward: {{{_EXPERTS}, normalize_scores: true, balance: {{name: global_aux}}, "
    "first_dense: 1, dense_hidden_size: 40}"
)
QUIET = (
    "--trainer.hard_stop={value: 2, unit: steps}",
    "--trainer.callbacks.lm_evaluator.enabled=false",
)


def trained(lock: Path, folder: Path, model: str, *more: str) -> Checkpoint:
    """A run of two steps; its last checkpoint."""
    build_trainer(lock, folder, f"--model={{{model}}}", *QUIET, *more).fit()
    return open_checkpoint(folder / "step00000002", World())


def receipt_of(folder: Path) -> ModelReceipt:
    """The receipt of an export."""
    return ModelReceipt.decode((folder / RECORD).read_bytes(), str(folder))


def read(path: Path) -> Any:
    """The value of a JSON file."""
    return json.loads(path.read_text())
