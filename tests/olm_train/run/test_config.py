"""The configuration of a run: every field is checked, can be given, and has its text."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from support.hf_models import hf_model
from support.runs import config_values

from olm_data.config.convert import as_dict, parse, rest_of
from olm_data.config.values import KeyPath, Values, dotted
from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_train.run.config import RunConfig


def kinds_of(hint: Any) -> list[Any]:
    """The alternatives of a field's type."""
    inner = [kind for kind in get_args(hint) if kind is not type(None)]
    return inner if inner and get_origin(hint) not in (list, tuple, dict, Mapping) else [hint]


Sections = tuple[tuple[KeyPath, type[Any]], ...]


def leaves(config: type[Any], path: KeyPath = (), above: Sections = ()) -> Iterator[Any]:
    """(path, sections on the way, hint) of each field that is no section."""
    way = (*above, (path, config))
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name == rest_of(config):
            continue  # stands for fields of any name
        here = (*path, field.name)
        sections = [kind for kind in kinds_of(hints[field.name]) if dataclasses.is_dataclass(kind)]
        for kind in sections:
            yield from leaves(kind, here, way)
        if not sections:
            yield here, way, hints[field.name]


FIELDS = list(leaves(RunConfig))


def refused(values: Values, path: KeyPath, wrong: str) -> UsageError:
    values.override(f"--{dotted(path)}={wrong}")
    with pytest.raises(UsageError) as caught:
        parse(RunConfig, values)
    return caught.value


def with_sections(way: Sections, values: Values) -> Values:
    """Values in which the section at each path is of its kind."""
    for path, config in way:
        names = [field.default for field in dataclasses.fields(config) if field.name == "name"]
        if names and isinstance(names[0], str) and path:
            values.override(f"--{dotted(path)}={{name: {names[0]}}}")
    return values


@pytest.fixture
def plain(tiny_mixture: Path, tmp_path: Path) -> dict[str, Any]:
    values = Values(config_values(tiny_mixture, tmp_path / "run"), folder=tmp_path)
    return as_dict(RunConfig.resolve(values))


def test_every_field_of_a_resolved_run_can_be_given_again_as_an_option(
    plain: dict[str, Any],
) -> None:
    values = Values(json.loads(json.dumps(plain)))
    given = 0
    for path, value in _plain_leaves(plain):
        values.override(f"--{dotted(path)}={json.dumps(value)}")
        given += 1
    assert given > 50
    assert as_dict(parse(RunConfig, values)) == plain


def test_a_wrong_type_is_refused_for_every_field_with_the_type_it_wants(
    plain: dict[str, Any],
) -> None:
    assert len(FIELDS) > 80
    for path, way, hint in FIELDS:
        values = with_sections(way, Values(json.loads(json.dumps(plain))))
        mapping = {get_origin(each) for each in (hint, *get_args(hint))} & {dict, Mapping}
        error = refused(values, path, "3" if mapping else "{no: such}")
        assert error.what.startswith(f"{dotted(path)} is "), error
        assert f"--{dotted(path)}" == error.where, error


def _plain_leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _plain_leaves(item, (*path, key))
    else:
        yield path, value


def test_a_preset_is_a_starting_point(tiny_mixture: Path, tmp_path: Path) -> None:
    values = Values(config_values(tiny_mixture, tmp_path))
    values.data["model"] = {"preset": "olm-1m", "n_layers": 2}
    model = RunConfig.resolve(values).model
    assert (model.d_model, model.n_layers, model.vocab_size) == (128, 2, 512)


def test_the_saved_configuration_is_the_configuration(tiny_mixture: Path, tmp_path: Path) -> None:
    config = RunConfig.resolve(Values(config_values(tiny_mixture, tmp_path)))
    assert RunConfig.resolve(Values(config.as_dict())) == config


@pytest.mark.parametrize("name", ["preset: olm-1m", "depth: 2"])
def test_a_shape_of_which_nothing_is_left_is_refused(
    tiny_mixture: Path, tmp_path: Path, name: str
) -> None:
    values = Values(config_values(tiny_mixture, tmp_path))
    values.override(f"--model={{{name}, d_model: 16, n_layers: 2, n_heads: 2}}")
    with pytest.raises(UsageError, match=r"has no effect: .*d_model.* are all given beside it"):
        RunConfig.resolve(values)


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


def test_each_section_has_its_table_and_each_field_its_text(repository: Path) -> None:
    page = (repository / "docs" / "reference" / "train-config.md").read_text()
    tables = set(re.findall(r"<!-- fields of (\w+) -->", page))
    hints = get_type_hints(RunConfig)
    assert tables == {"run", *(name for name, hint in hints.items() if is_dataclass(hint))}
    lines = re.findall(r"^\| `.*$", page, re.MULTILINE)
    assert len(lines) > 100
    assert not [line for line in lines if not line.rpartition(" | ")[2].strip(" |")]
