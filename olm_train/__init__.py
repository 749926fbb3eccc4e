"""Train decoder language models on rows of an `olm_data` mixture lock.

Names are imported on first use: torch is loaded by the module that needs it, so that configuration
errors and help are shown at once.

    from olm_train import DataLoader, DecoderConfig, Trainer, TransformerTrainModuleConfig, World
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "AdamWConfig": "olm_train.optim.adamw",
    "Callback": "olm_train.callbacks.base",
    "CheckpointerConfig": "olm_train.checkpoint.policy",
    "CosineWithWarmup": "olm_train.optim.schedule",
    "DataLoader": "olm_train.data.loader",
    "Decoder": "olm_train.model.decoder",
    "DecoderConfig": "olm_train.model.config",
    "Duration": "olm_train.duration",
    "EvalLoader": "olm_train.data.loader",
    "LMEvaluatorCallback": "olm_train.callbacks.evaluator",
    "TrainModule": "olm_train.train_module_base",
    "Trainer": "olm_train.trainer",
    "TransformerTrainModule": "olm_train.train_module",
    "TransformerTrainModuleConfig": "olm_train.train_module_config",
    "World": "olm_train.distributed.world",
    "init_parameters": "olm_train.model.init",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'olm_train' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
