"""docs/reference/training-guide.md: each name of the guides is on it, and leads to what exists."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from olm_train import AutoTrainer
from olm_train.extensions.auto.strategy import TrainerStrategy
from olm_train.parallel.config import DataParallelConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs/reference/training-guide.md").read_text()
TICKED = re.compile(r"`([^`]+)`")
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| `")]
THERE = {name for row in ROWS for name in TICKED.findall(row[0])}
HERE = sorted({name for row in ROWS for name in TICKED.findall(row[-1])})

CLASSES = """
LocalTextDataset HuggingFaceTextDataset FineWebEduDataset HFTokenizer DataLoader Trainer DDPTrainer
FSDPTrainer AutoTrainer TrainerStrategy TrainerStrategy.MULTI_GPU_DDP DeviceConfig AdamW GPT2
WarmupCosineScheduler CosineAnnealingLR WarmupLR LinearLR LinearDecayLR load_model model.save
setup_distributed cleanup_distributed get_local_rank trainer.train trainer.save_checkpoint
trainer.losses trainer.global_step trainer.current_epoch trainer.scheduler trainer.scaler
"""
OPTIONS = """
device context_length learning_rate weight_decay warmup_steps total_steps min_lr scheduler
use_warmup_cosine use_amp grad_accum_steps grad_clip_norm callbacks force_strategy balanced
memory_efficient speed epochs max_steps log_interval min_num_params transformer_layer_cls
cpu_offload batch_size num_workers pin_memory persistent_workers distributed=True shuffle
shuffle_buffer_size skip_batches
sharding_strategy="FULL_SHARD" sharding_strategy="SHARD_GRAD_OP" sharding_strategy="HYBRID_SHARD"
auto_wrap_policy="size" auto_wrap_policy="transformer" mixed_precision_policy="bf16"
"""


def found(path: str) -> Any:
    """Return what a dotted path leads to."""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            value = getattr(value, name)
        return value
    raise AssertionError(f"{path} is nowhere")


def test_each_name_of_the_guides_is_on_the_page() -> None:
    assert {*CLASSES.split(), *OPTIONS.split()} - THERE == set()


@pytest.mark.parametrize("name", HERE)
def test_what_it_leads_to_is_here(name: str) -> None:
    if option := re.fullmatch(r"AutoTrainer(\.train)?\((\w+)\)", name):
        owner = AutoTrainer.train if option[1] else AutoTrainer
        assert option[2] in inspect.signature(owner).parameters
    elif name.startswith("DataParallelConfig("):
        eval(name, {"DataParallelConfig": DataParallelConfig})
    elif re.fullmatch(r"(olm_train|torch)(\.\w+)+", name):
        assert found(name) is not None


def test_defaults_that_the_guide_gives_are_those_here() -> None:
    given = inspect.signature(AutoTrainer).parameters
    wanted = {"device": "auto", "use_warmup_cosine": True, "use_amp": True, "grad_clip_norm": None}
    wanted["preset"] = "balanced"
    assert {name: given[name].default for name in wanted} == wanted
    assert TrainerStrategy.MULTI_GPU_DDP in TrainerStrategy
