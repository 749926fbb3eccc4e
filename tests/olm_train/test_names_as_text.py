"""A choice means the same wherever it is made: by its member or its text, in Python or a file."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from support.own_data import Own
from support.sources import REPOSITORY, modules, together, tree
from torch import nn
from torch.utils import data

from olm_data.config.convert import Config, is_section, is_union, kinds_of, plain
from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError
from olm_data.rows.reader import RowReader
from olm_train import (
    AdamWConfig,
    BasicTrainModule,
    DataLoader,
    Duration,
    EvalLoader,
    TorchDataLoader,
    Trainer,
    TransformerTrainModule,
    TransformerTrainModuleConfig,
)
from olm_train.checkpoint.policy import CheckpointerConfig, LoadPolicy, LoadStrategy
from olm_train.model.config import DecoderConfig
from olm_train.stability.gate import NonFinite

pytestmark = together

MADE_OF_MEMBERS = {
    "olm_data.extensions.eval_sets.tasks.Task",
    "olm_train.extensions.auto.strategy.Choice",
    "olm_train.checkpoint.save.Contents",
}
"""Records that no user makes: what makes them has the members."""


def bases(node: ast.ClassDef) -> set[str]:
    return {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in modules():
        name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        yield from ((name, n) for n in tree(path).body if isinstance(n, ast.ClassDef))


def with_choices() -> Iterator[tuple[str, str]]:
    """Dataclasses whose annotations name an enumeration, or a Literal."""
    enums = {n.name for _, n in classes() if bases(n) & {"StrEnum", "Enum"}}
    for module, node in classes():
        if not any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            continue
        fields = [ast.unparse(n.annotation) for n in node.body if isinstance(n, ast.AnnAssign)]
        words = {w.id for f in fields for w in ast.walk(ast.parse(f)) if isinstance(w, ast.Name)}
        if words & enums:
            yield module, node.name


@cache
def found() -> list[tuple[str, str]]:
    return sorted(with_choices())


def test_what_has_an_enumeration_is_read_at_the_door_or_made_of_members() -> None:
    kinds = {f"{m}.{name}": getattr(importlib.import_module(m), name) for m, name in found()}
    others = {
        name
        for name, kind in kinds.items()
        if not issubclass(kind, Config)
        and any(enum_of(hint)[0] for hint in get_type_hints(kind, include_extras=True).values())
    }
    assert others == MADE_OF_MEMBERS
    assert len(kinds) - len(others) >= 8


def value_of(hint: Any) -> Any:
    """Some value of an annotation."""
    kind = plain(hint)[0]
    kind = kinds_of(kind)[0] if is_union(kind) else kind
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    if get_origin(kind) is Literal:
        return get_args(kind)[0]
    if get_origin(kind) is list:
        return [value_of(get_args(kind)[0])]
    if kind is DecoderConfig:
        return DecoderConfig(vocab_size=9, d_model=8, n_layers=1, n_heads=2, n_kv_heads=2)
    if is_section(kind):
        return made(kind)
    return {int: 8, float: 0.5, bool: True}.get(kind, "x/y")


def made(kind: Any, **given: Any) -> Any:
    """A dataclass with some value of each field that has no default."""
    hints = get_type_hints(kind, include_extras=True)
    needed = {
        f.name: value_of(hints[f.name])
        for f in dataclasses.fields(kind)
        if f.init
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and f.name not in given
    }
    return kind(**needed, **given)


def enum_of(hint: Any) -> tuple[type[Enum] | None, bool]:
    """The enumeration of a field, and whether it has a list of them."""
    for kind in kinds_of(plain(hint)[0]):
        kind = plain(kind)[0]
        if get_origin(kind) is list:
            return enum_of(get_args(kind)[0])[0], True
        if isinstance(kind, type) and issubclass(kind, Enum):
            return kind, False
    return None, False


def outcome(kind: Any, field: str, value: Any) -> Any:
    try:
        return getattr(made(kind, **{field: value}), field)
    except UsageError as error:
        return error.what


def test_text_is_the_member_it_names_in_every_configuration() -> None:
    kinds = [getattr(importlib.import_module(module), name) for module, name in found()]
    for kind in kinds:
        if issubclass(kind, Config):
            check_choices(kind)


def check_choices(kind: Any) -> None:
    for field, hint in get_type_hints(kind, include_extras=True).items():
        enum, several = enum_of(hint)
        if enum is None:
            continue
        for member in enum:
            text, whole = ([member.value], [member]) if several else (member.value, member)
            as_text, as_member = outcome(kind, field, text), outcome(kind, field, whole)
            assert as_text == as_member, (kind, field)
            if as_text == whole:
                assert (as_text[0] if several else as_text) is member
        bad = outcome(kind, field, ["bananas"] if several else "bananas")
        assert "not 'bananas'" in bad, bad


def test_no_configuration_has_a_door_of_its_own() -> None:
    for module, node in classes():
        own = [n for n in node.body if getattr(n, "name", "") == "__post_init__"]
        kind = getattr(importlib.import_module(module), node.name) if own else object
        if kind is not Config and issubclass(kind, Config):
            assert "super().__post_init__()" in ast.unparse(own[0]), f"{module}.{node.name}"


def test_a_number_of_numpy_is_a_number() -> None:
    found = AdamWConfig(lr=np.logspace(-4, -2, 3)[1], betas=(np.float32(0.5), 0.25))
    assert (type(found.lr), found.betas) == (float, (0.5, 0.25))
    assert type(CheckpointerConfig(save_interval=np.int64(5)).save_interval) is int  # type: ignore[arg-type]
    assert CheckpointerConfig(save_async=np.bool_(False)).save_async is False  # type: ignore[arg-type]
    assert Duration.steps(np.int32(3)) == Duration.steps(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"save_interval is an integer, not 2\.5"):
        CheckpointerConfig(save_interval=np.float64(2.5))  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", LoadStrategy)
def test_sections_within_are_read_alike(strategy: LoadStrategy) -> None:
    assert LoadPolicy(strategy=strategy.value).strategy is strategy  # type: ignore[arg-type]
    assert Duration(value=3, unit="steps") == Duration.steps(3)  # type: ignore[arg-type]
    assert CheckpointerConfig(save_interval="1K").save_interval == 1000  # type: ignore[arg-type]


def module_with(**options: Any) -> BasicTrainModule:
    return BasicTrainModule(
        nn.Linear(1, 1), torch.optim.SGD, nn.MSELoss(), optim={"lr": 0.1}, **options
    )


def test_a_train_module_takes_a_policy_by_its_name() -> None:
    module = module_with(non_finite="skip")
    assert module.non_finite is NonFinite.skip
    bad = torch.tensor(float("nan"))
    module._gate.judge(bad, bad)
    assert module._gate.judge(torch.ones(()), torch.ones(()))[1] == 0, "the next step is taken"


@pytest.mark.parametrize(
    "options",
    [
        {"non_finite": "bananas"},
        {"dp_config": "fsdp"},
        {"max_grad_norm": -1.0},
        {"seed": "1"},
        {"scheduler": "cosine"},
    ],
)
def test_a_train_module_refuses_what_is_no_option(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(options))):
        module_with(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"on_cancel": "bananas"},
        {"metrics_collect_interval": 0},
        {"metrics_collect_interval": "5"},
        {"max_rewinds": -1},
        {"time_limit": "sloorm"},
        {"time_limit": 0},
        {"time_margin": -1.0},
        {"load": {"strategy": "never"}},
        {"checkpointer": "often"},
        {"callbacks": 3},
        {"comm": 3},
        {"lease": 3},
        {"save_folder": 3},
    ],
)
def test_a_trainer_refuses_what_is_no_argument(options: dict[str, Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "train_module": module_with(),
        "data_loader": Own(),
        "save_folder": tmp_path,
        "max_duration": Duration.steps(1),
    }
    with pytest.raises(UsageError, match=next(iter(options))):
        Trainer(**{**given, **options})


SHAPE = DecoderConfig(vocab_size=9, d_model=8, n_layers=1, n_heads=2, n_kv_heads=2)
STEP = TransformerTrainModuleConfig(rank_microbatch_size=8)
SIZES = {"global_batch_size": 1024, "rank_microbatch_size": 512}
LOADER = data.DataLoader(data.TensorDataset(torch.zeros(8, 1)), batch_size=4)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (DataLoader, {"lock": "lock.json", **SIZES, "verify": "bananas"}),
        (DataLoader, {"lock": "lock.json", "rank_microbatch_size": 512, "global_batch_size": "1K"}),
        (DataLoader, {"lock": "lock.json", **SIZES, "prefetch": 2.5}),
        (DataLoader, {"lock": "lock.json", **SIZES, "rank": "0"}),
        (DataLoader, {"lock": "lock.json", **SIZES, "cache": "shards"}),
        (EvalLoader, {"sequence_length": 8, "rank_microbatch_size": 8, "dataset": 3}),
        (EvalLoader, {"dataset": "x", "rank_microbatch_size": 8, "sequence_length": "8"}),
        (TorchDataLoader, {"loader": LOADER, "accumulate": "2"}),
        (TorchDataLoader, {"loader": LOADER, "global_batch_size": "8"}),
        (TorchDataLoader, {"loader": LOADER, "epochs": 1.5}),
        (TorchDataLoader, {"loader": LOADER, "seed": "1"}),
        (TorchDataLoader, {"loader": LOADER, "world": 2}),
        (RowReader, {"lock": "lock.json", "verify": "bananas"}),
        (Dataset.open, {"path": "x", "verify": "bananas"}),
        (Dataset.open, {"path": "x", "max_open": "many"}),
        (TransformerTrainModule, {"model": SHAPE, "seed": 1, "config": {}}),
        (TransformerTrainModule, {"model": SHAPE, "config": STEP, "seed": "1"}),
    ],
)
def test_what_reads_and_what_steps_refuse_what_is_no_argument(
    make: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=list(options)[-1]):
        make(**options)
