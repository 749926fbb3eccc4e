"""What the package offers, for type checkers: `__init__.py` imports it on first use."""

from olm_train.callbacks.base import Callback as Callback
from olm_train.callbacks.evaluator import LMEvaluatorCallback as LMEvaluatorCallback
from olm_train.checkpoint.policy import CheckpointerConfig as CheckpointerConfig
from olm_train.data.base import DataLoaderBase as DataLoaderBase
from olm_train.data.loader import DataLoader as DataLoader
from olm_train.data.loader import EvalLoader as EvalLoader
from olm_train.distributed.world import World as World
from olm_train.duration import Duration as Duration
from olm_train.extensions.any_model.torch_loader import TorchDataLoader as TorchDataLoader
from olm_train.extensions.any_model.train_module import BasicTrainModule as BasicTrainModule
from olm_train.extensions.auto.strategy import DeviceConfig as DeviceConfig
from olm_train.extensions.auto.strategy import TrainerStrategy as TrainerStrategy
from olm_train.extensions.auto.text import FineWebEduDataset as FineWebEduDataset
from olm_train.extensions.auto.text import HuggingFaceTextDataset as HuggingFaceTextDataset
from olm_train.extensions.auto.text import LocalTextDataset as LocalTextDataset
from olm_train.extensions.auto.trainer import AutoTrainer as AutoTrainer
from olm_train.extensions.hf.model_format import load_model as load_model
from olm_train.model.config import DecoderConfig as DecoderConfig
from olm_train.model.decoder import Decoder as Decoder
from olm_train.model.init import init_parameters as init_parameters
from olm_train.optim.adamw import AdamWConfig as AdamWConfig
from olm_train.optim.schedule import CosineWithWarmup as CosineWithWarmup
from olm_train.train_module import TransformerTrainModule as TransformerTrainModule
from olm_train.train_module_base import TrainModule as TrainModule
from olm_train.train_module_config import (
    TransformerTrainModuleConfig as TransformerTrainModuleConfig,
)
from olm_train.trainer import Trainer as Trainer

__all__ = [
    "AdamWConfig",
    "AutoTrainer",
    "BasicTrainModule",
    "Callback",
    "CheckpointerConfig",
    "CosineWithWarmup",
    "DataLoader",
    "DataLoaderBase",
    "Decoder",
    "DecoderConfig",
    "DeviceConfig",
    "Duration",
    "EvalLoader",
    "FineWebEduDataset",
    "HuggingFaceTextDataset",
    "LMEvaluatorCallback",
    "LocalTextDataset",
    "TorchDataLoader",
    "TrainModule",
    "Trainer",
    "TrainerStrategy",
    "TransformerTrainModule",
    "TransformerTrainModuleConfig",
    "World",
    "init_parameters",
    "load_model",
]
