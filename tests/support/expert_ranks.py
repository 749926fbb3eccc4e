"""Small mixtures of experts, and the ways to balance and to recompute them."""

from __future__ import annotations

from typing import Any

from support.training import MODEL

from olm_train.model.config import DecoderConfig
from olm_train.optim.muon import MuonConfig
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig

EXPERTS: dict[str, Any] = {
    "name": "moe",
    "n_experts": 6,
    "top_k": 2,
    "hidden_size": 24,
    "shared_hidden_size": 16,
    "balance": {"name": "bias", "rate": 0.01},
    "z_loss": 1e-3,
}
BALANCES: dict[str, dict[str, Any]] = {
    "sequence_aux": {"balance": {"name": "sequence_aux", "weight": 0.1}},
    "global_aux": {
        "balance": {"name": "global_aux", "weight": 0.1},
        "scores": "sigmoid",
        "first_dense": 1,
        "dense_hidden_size": 40,
    },
}
"""Those beside that of `EXPERTS` that do not depend on how a step is cut."""
RECOMPUTED = {
    "kept": ActivationCheckpointingConfig(),
    "full": ActivationCheckpointingConfig(mode="full"),
    "ops": ActivationCheckpointingConfig(mode="selected_ops"),
}
MUON = MuonConfig(lr=1e-2)


def of_experts(**options: Any) -> DecoderConfig:
    return MODEL.changed(feed_forward=EXPERTS | options)
