"""Rows of a mixture lock as tensors: `DataLoader` for training, `EvalLoader` for evaluation."""

from olm_train.data.batch import Batch
from olm_train.data.loader import DataLoader, EvalLoader

__all__ = ["Batch", "DataLoader", "EvalLoader"]
