"""Train decoder language models on rows of an `olm_data` mixture lock.

Names (`__init__.pyi` types them) are imported on first use: torch is loaded by the module that
needs it, so that configuration errors and help are shown at once.

    from olm_train import DataLoader, DecoderConfig, Trainer, TransformerTrainModuleConfig, World
"""

from __future__ import annotations

import importlib

_HOMES = {
    "AdamWConfig": "olm_train.optim.adamw",
    "AutoTrainer": "olm_train.extensions.auto.trainer",
    "BasicTrainModule": "olm_train.basic_train_module",
    "Callback": "olm_train.callbacks.base",
    "CheckpointerConfig": "olm_train.checkpoint.policy",
    "CosineWithWarmup": "olm_train.optim.schedule",
    "DataLoader": "olm_train.data.loader",
    "DataLoaderBase": "olm_train.data.base",
    "Decoder": "olm_train.model.decoder",
    "DecoderConfig": "olm_train.model.config",
    "DeviceConfig": "olm_train.extensions.auto.strategy",
    "Duration": "olm_train.duration",
    "EvalLoader": "olm_train.data.loader",
    "FineWebEduDataset": "olm_train.extensions.auto.text",
    "HuggingFaceTextDataset": "olm_train.extensions.auto.text",
    "LMEvaluatorCallback": "olm_train.callbacks.evaluator",
    "LocalTextDataset": "olm_train.extensions.auto.text",
    "TorchDataLoader": "olm_train.data.torch_loader",
    "TrainModule": "olm_train.train_module_base",
    "Trainer": "olm_train.trainer",
    "TrainerStrategy": "olm_train.extensions.auto.strategy",
    "TransformerTrainModule": "olm_train.train_module",
    "TransformerTrainModuleConfig": "olm_train.train_module_config",
    "World": "olm_train.distributed.world",
    "init_parameters": "olm_train.model.init",
    "load_model": "olm_train.extensions.hf.load_model",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from olm_data.extras import needs

        with needs(f"olm_train.{name}"):
            return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'olm_train' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
