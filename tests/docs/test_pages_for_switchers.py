"""docs/reference/{callbacks,training-guide}.md: what they name is here, with defaults and a test.

And they name all that the guides and `support.callbacks_elsewhere` do, with its default there.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from support.callbacks_elsewhere import GUIDE, HOOKS, MADE, NEEDED, OPTIONS, RESEARCHERS

from olm_data.config.convert import as_dict
from olm_train import AutoTrainer
from olm_train.callbacks.base import Callback
from olm_train.callbacks.config import CallbacksConfig
from olm_train.extensions.auto.strategy import TrainerStrategy
from olm_train.parallel.config import DataParallelConfig
from olm_train.run.command import FLAGS

REPOSITORY = Path(__file__).resolve().parents[2]


PAGE = (REPOSITORY / "docs/reference/callbacks.md").read_text()


TICKED = re.compile(r"`([^`]+)`")


def rows(text: str) -> list[list[str]]:
    """The cells of the tables of a text, those of names."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


CLASSES, _, _REST = PAGE.partition("## Hooks")


_HOOKS, _, _OPTIONS = _REST.partition("## Options")


_OPTIONS, _, RESEARCH = _OPTIONS.partition("## The researchers' guide")


_HERE, _, _NOT_HERE = _OPTIONS.partition("Options that are not here:")


ROWS, LEFT_OUT = rows(_HERE), rows(_NOT_HERE)


NO_CALLBACK = {row[0].strip("`") for row in rows(CLASSES) if row[1].startswith("none")}


"""Classes that have no counterpart."""


def default_of(option: str) -> Any:
    """Return the default of an option as JSON has it, MISSING where it is needed."""
    section, name = option.split(".")
    kind = CallbacksConfig.kinds()[section]
    (field,) = (each for each in fields(kind) if each.name == name)
    if field.default_factory is not MISSING:
        return as_dict(field.default_factory())
    return field.default if field.default is MISSING else as_dict(field.default)


@pytest.mark.parametrize("row", ROWS, ids=[row[0].split("`")[1] for row in ROWS])
def test_an_option_is_here_with_its_default_and_a_test(row: list[str]) -> None:
    names, theirs, ours, said, test = row
    for name in TICKED.findall(names):
        kind, _, option = name.partition(".")
        wanted = OPTIONS.get(kind, {}).get(option, MADE)
        if wanted is not MADE and wanted is not NEEDED:
            assert json.loads(TICKED.findall(theirs)[0]) == wanted, f"{name} is {wanted} there"
    (option,) = TICKED.findall(ours)
    (path,) = TICKED.findall(test)
    found = default_of(option)
    if said == "needed":
        assert found is MISSING
    else:
        (text,) = TICKED.findall(theirs if said == "=" else said)
        assert found == json.loads(text)
    name = option.partition(".")[2]
    tests = (REPOSITORY / "tests/olm_train" / path).read_text()
    # In most tests; the options that every callback has are told by the callback's own.
    assert name in tests or name == "enabled", f"{path} says nothing of {name}"


def test_each_class_and_hook_of_the_reference_is_on_the_page() -> None:
    named = {name for row in rows(CLASSES) for name in TICKED.findall(row[0])}
    assert {*OPTIONS, *GUIDE} <= named
    hooks = {name for row in rows(_HOOKS) for name in TICKED.findall(row[0])}
    assert set(HOOKS) <= hooks


def test_each_option_of_the_reference_is_on_the_page_once() -> None:
    told = [name for row in [*ROWS, *LEFT_OUT] for name in TICKED.findall(row[0])]
    for kind, options in OPTIONS.items():
        if kind in NO_CALLBACK:
            continue
        for option in options:
            assert told.count(f"{kind}.{option}") == 1, f"{kind}.{option}"


def test_a_default_that_is_another_one_is_explained() -> None:
    others = set()
    for _, theirs, ours, said, _ in ROWS:
        if theirs.startswith("`") and said.startswith("`"):
            pair = [json.loads(TICKED.findall(cell)[0]) for cell in (theirs, said)]
            if pair[0] != pair[1] and pair != [None, []]:
                others |= set(TICKED.findall(ours))
    explained = _HERE.partition("Where the default is another one:")[2]
    assert set(re.findall(r"`(\w+\.\w+)`[,:]", explained)) == others


def test_each_callback_and_hook_that_it_leads_to_is_here() -> None:
    known = set(CallbacksConfig.kinds())
    for row in rows(CLASSES):
        for name in TICKED.findall(row[1]):
            if re.fullmatch(r"[a-z_]+", name):
                assert name in known | {"sequence_length"}, name
    for row in rows(_HOOKS):
        for name in TICKED.findall(row[1]):
            assert hasattr(Callback, name), name


def test_each_name_of_the_researchers_guide_leads_to_one_that_is_here() -> None:
    told = [name for row in rows(RESEARCH) for name in TICKED.findall(row[0])]
    assert sorted(told) == sorted(RESEARCHERS)
    fields_of_runs = (REPOSITORY / "docs/reference/train-config.md").read_text()
    for row in rows(RESEARCH):
        for name in TICKED.findall(row[1]):
            if name.startswith(("olm_train.", "olm_data.")):
                found, *parts = name.split(".")
                thing: Any = importlib.import_module(found)
                for part in parts:
                    found = f"{found}.{part}"
                    if not hasattr(thing, part):
                        importlib.import_module(found)
                    thing = getattr(thing, part)
            elif re.fullmatch(r"(trainer|train_module|data_loader)\.[a-z_.]+", name):
                assert f"| `{name}` |" in fields_of_runs, name
            elif name.startswith("--") and "=" not in name:
                assert name in FLAGS


GUIDE_PAGE = (Path(__file__).resolve().parents[2] / "docs/reference/training-guide.md").read_text()


GUIDE_ROWS = [
    line.strip("|").split("|") for line in GUIDE_PAGE.splitlines() if line.startswith("| `")
]


THERE = {name for row in GUIDE_ROWS for name in TICKED.findall(row[0])}


HERE = sorted({name for row in GUIDE_ROWS for name in TICKED.findall(row[-1])})


GUIDE_NAMES = """
LocalTextDataset HuggingFaceTextDataset FineWebEduDataset HFTokenizer DataLoader Trainer DDPTrainer
FSDPTrainer AutoTrainer TrainerStrategy TrainerStrategy.MULTI_GPU_DDP DeviceConfig AdamW GPT2
WarmupCosineScheduler CosineAnnealingLR WarmupLR LinearLR LinearDecayLR load_model model.save
setup_distributed cleanup_distributed get_local_rank trainer.train trainer.save_checkpoint
trainer.losses trainer.global_step trainer.current_epoch trainer.scheduler trainer.scaler
"""


GUIDE_OPTIONS = """
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
    assert {*GUIDE_NAMES.split(), *GUIDE_OPTIONS.split()} - THERE == set()


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
