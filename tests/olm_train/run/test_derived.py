"""`model` out of the weights of `trainer.load_path`: left out, in part, or contradicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.hf_models import hf_model
from support.runs import config_values

from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_train.run.config import RunConfig


@pytest.fixture
def place(tmp_path: Path, tiny_mixture: Path) -> Path:
    ids = Lock.read(str(tiny_mixture)).tokenizer.vocab_size
    hf_model("llama", vocab_size=ids).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def resolved(lock: Path, place: Path | str, model: Any = None, **trainer: Any) -> RunConfig:
    values = config_values(lock, Path(place).parent / "run")
    values["model"] = model
    values["trainer"] |= {
        "load_path": str(place),
        "load_trainer_state": False,
        "load_optim_state": False,
        **trainer,
    }
    if model is None:
        del values["model"]
    return RunConfig.resolve(Values(values))


def test_the_shape_follows_from_the_weights(tiny_mixture: Path, place: Path) -> None:
    model = resolved(tiny_mixture, place).model
    assert (model.d_model, model.n_layers, model.n_heads, model.n_kv_heads) == (32, 3, 4, 2)


def test_what_changes_no_shape_may_stand_beside(tiny_mixture: Path, place: Path) -> None:
    model = resolved(
        tiny_mixture, place, {"attention": {"backend": "sdpa"}, "vocab_multiple": 64, "d_model": 32}
    ).model
    assert (model.attention.backend, model.vocab_multiple) == ("sdpa", 64)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"d_model": 64}, "d_model"),
        ({"n_kv_heads": None}, "n_kv_heads"),
        ({"preset": "olmo2-1b"}, r"model\.block"),
        ({"vocab_size": 9999}, "vocab_size"),
        ({"name": "my_lab.parts:Shape"}, "class of your own"),
    ],
)
def test_what_contradicts_is_refused_by_name(
    tiny_mixture: Path, place: Path, model: dict[str, Any], name: str
) -> None:
    with pytest.raises(UsageError, match=name):
        resolved(tiny_mixture, place, model)


def test_extending_is_for_models_of_transformers(tiny_mixture: Path, tmp_path: Path) -> None:
    model = {"d_model": 16, "n_layers": 2, "n_heads": 2}
    with pytest.raises(UsageError, match="model of transformers alone"):
        resolved(tiny_mixture, tmp_path / "none", model, load_vocabulary="extend")


def test_without_load_path_a_model_is_needed(tiny_mixture: Path, tmp_path: Path) -> None:
    values = config_values(tiny_mixture, tmp_path / "run")
    del values["model"]
    with pytest.raises(UsageError, match="model"):
        RunConfig.resolve(Values(values))
    values["trainer"]["load_vocabulary"] = "extend"
    values["model"] = {"d_model": 16, "n_layers": 2, "n_heads": 2}
    with pytest.raises(UsageError, match="no effect without load_path"):
        RunConfig.resolve(Values(values))
