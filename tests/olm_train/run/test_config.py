"""The configuration of a run: every field is checked, and can be set on the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from support.runs import config_values

from olm_data.config.convert import as_dict, parse, rest_of
from olm_data.config.values import KeyPath, Values, dotted
from olm_data.errors import UsageError
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
