"""Optimisers, parameter groups, gradient clipping and learning-rate schedules."""

from __future__ import annotations

from olm_train.optim.adamw import AdamConfig, AdamWConfig, SkipStepAdamWConfig
from olm_train.optim.dion import DionConfig
from olm_train.optim.lion import LionConfig, SkipStepLionConfig
from olm_train.optim.muon import MuonConfig

AnyOptim = (
    AdamWConfig
    | AdamConfig
    | DionConfig
    | LionConfig
    | MuonConfig
    | SkipStepAdamWConfig
    | SkipStepLionConfig
)
"""What `train_module.optim` may be, told apart by `name`."""
