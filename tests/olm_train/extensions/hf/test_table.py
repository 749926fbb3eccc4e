"""Each row of the table against transformers' own classes."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from support.hf_models import OLD

from olm_train.extensions.hf.attention import LayerWindows, OneWindow, QueryScale
from olm_train.extensions.hf.family import Family
from olm_train.extensions.hf.fields import REQUIRED, FixedValue, Number
from olm_train.extensions.hf.positions import EqualRope, LayerRope, NoRope, TableSize
from olm_train.extensions.hf.table import FAMILIES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]


def class_defaults(family: Family) -> Any:
    """The configuration of a model of which no field is given."""
    return getattr(transformers, family.architecture).config_class()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_absent_fields_mean_what_they_mean_to_transformers(family: Family) -> None:
    default = class_defaults(family)
    said = {
        row.name: row.default
        for row in family.rows
        if isinstance(row, Number | FixedValue) and row.default is not REQUIRED
    }
    for row in family.rows:
        match row:
            case Number("num_key_value_heads", default=None):
                said[row.name] = default.num_attention_heads
            case Number("head_dim", default=None):
                del said[row.name]  # some classes fill it in
            case NoRope():
                said["no_rope_layer_interval"] = row.interval
            case QueryScale():
                said["query_pre_attn_scalar"] = row.default
            case TableSize():
                said["n_positions"] = row.default
            case EqualRope() | LayerRope():
                said["max_position_embeddings"] = row.positions
    assert said == {name: getattr(default, name, None) for name in said}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_absent_bases_and_windows_too(family: Family) -> None:
    default = class_defaults(family)
    for row in family.rows:
        if OLD:
            if isinstance(row, EqualRope) or (isinstance(row, LayerRope) and row.local):
                assert default.rope_theta == row.theta
            if isinstance(row, LayerRope) and row.local:
                assert getattr(default, row.local) == row.windowed
        elif isinstance(row, EqualRope):
            assert default.rope_parameters["rope_theta"] == row.theta
        elif isinstance(row, LayerRope):
            bases = {kind: each["rope_theta"] for kind, each in default.rope_parameters.items()}
            assert bases == {"full_attention": row.theta, "sliding_attention": row.windowed}
        if isinstance(row, LayerWindows | OneWindow):
            switched = getattr(default, "use_sliding_window", True)
            assert default.sliding_window == (row.default if switched else None)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_configuration_without_optional_fields_is_the_default_of_the_class(
    family: Family,
) -> None:
    default = class_defaults(family)
    required = [
        row.name for row in family.rows if isinstance(row, Number) and row.default is REQUIRED
    ]
    bare = {name: getattr(default, name) for name in required}
    if family.name == "olmo3":  # the defaults of versions differ: it must be given
        if OLD:
            return
        bare["rope_parameters"] = default.rope_parameters
    full = default.to_dict()
    full = {name: value for name, value in full.items() if name in bare or value is not None}
    assert family.config_from_hf(bare) == family.config_from_hf(full)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_names_are_those_of_the_class(family: Family) -> None:
    assert class_defaults(family).model_type == family.model_type
    assert getattr(transformers, family.architecture).__name__ == family.architecture
