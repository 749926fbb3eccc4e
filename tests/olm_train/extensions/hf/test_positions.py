"""RoPE in both forms: what they say together is read, where they differ it is refused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from support.hf_models import LINEAR, LLAMA3, OLD, YARN, hf_fields, hf_model

from olm_data.errors import InputError, UsageError
from olm_train.extensions.hf.table import GEMMA3, LLAMA, OLMO3, family_of_hf
from olm_train.model.config import DecoderConfig
from olm_train.model.rope import (
    Llama3Scaling,
    PositionInterpolation,
    RopeScaling,
    YaRNScaling,
    rope_table,
)

SMALL = DecoderConfig(vocab_size=9, d_model=64, n_layers=1, n_heads=2, positions={"theta": 500.0})
SAME: dict[str, Any] = {"rope_parameters": None, "rope_theta": None, "rope_scaling": None}
FIELDS = {**LLAMA.config_to_hf(SMALL, max_position_embeddings=16), **SAME}
SCALINGS: list[tuple[dict[str, Any], RopeScaling]] = [
    (LINEAR, PositionInterpolation(factor=4)),
    (LLAMA3, Llama3Scaling(factor=8, old_context_len=16)),
    (YARN, YaRNScaling(factor=4, old_context_len=16, beta_fast=4)),
]


def flat(parameters: dict[str, Any], kind: str = "rope_type") -> dict[str, Any]:
    """The form of transformers 4, or with "type" an older one."""
    own = {key: value for key, value in parameters.items() if not key.startswith("rope_t")}
    return {
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": {kind: parameters["rope_type"], **own},
    }


@pytest.mark.parametrize(("parameters", "scaling"), SCALINGS, ids=lambda each: str(each)[:20])
def test_each_form_is_read_and_both_are_written(
    parameters: dict[str, Any], scaling: RopeScaling
) -> None:
    wanted = LLAMA.config_from_hf(FIELDS | {"rope_theta": 500.0}).changed(
        positions={"scaling": scaling}
    )
    nested = {"rope_parameters": parameters}
    for form in (nested, flat(parameters), flat(parameters, "type"), nested | flat(parameters)):
        assert LLAMA.config_from_hf(FIELDS | form) == wanted
    written = LLAMA.config_to_hf(wanted, max_position_embeddings=64)
    for form in ("rope_parameters", "rope_scaling"):
        left = {key: value for key, value in written.items() if form == key or key not in SAME}
        assert LLAMA.config_from_hf(left | {"rope_theta": 500.0}) == wanted


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_parameters": {"rope_theta": 500.0}, "rope_theta": 1e4}, "twice, 10000.0 and 500.0"),
        ({"rope_parameters": YARN, "rope_scaling": {"type": "yarn", "factor": 8}}, "another"),
        ({"rope_parameters": YARN | {"attention_factor": 2.0}}, "rope_parameters.attention_factor"),
        ({"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, "attention_factor"),
        ({"rope_parameters": YARN | {"truncate": False}}, "rope_parameters.truncate"),
        ({"rope_parameters": YARN | {"beta_slow": 9.0}}, "beta_slow lies between"),
        ({"rope_parameters": LINEAR | {"factor": 0.5}}, "factor is at least 1, not 0.5"),
        ({"rope_parameters": LINEAR | {"factor": float("inf")}}, "factor"),
        ({"rope_parameters": YARN | {"beta_fast": float("inf")}}, "beta_fast"),
        ({"rope_parameters": LINEAR | {"beta_fast": 3}}, "beta_fast is not known"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor lies between"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "full_attention"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is dynamic"),
        ({"rope_scaling": LINEAR | {"type": "yarn"}}, "type is yarn; readers differ"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}, "max_position_embeddings": 3}, "n of 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refusal:
        LLAMA.config_from_hf(FIELDS | change)
    assert said in str(refusal.value)


OLMO = SMALL.changed(block="reordered_norm", attention={"qk_norm": "full", "sliding_window": (8,)})
GEMMA = SMALL.changed(
    block="peri_norm",
    feed_forward="geglu",
    norm={"zero_centred": True},
    embed_scale=8.0,
    attention={"qk_norm": "head", "sliding_window": (8,)},
    positions={"theta_windowed": 50.0},
)


def test_a_flat_base_that_versions_read_differently_is_refused() -> None:
    written = dict(OLMO3.config_to_hf(OLMO, max_position_embeddings=16))
    assert OLMO3.config_from_hf(written).positions.theta == 500.0
    del written["rope_parameters"]
    with pytest.raises(InputError, match=r"rope_theta is 500.0; .* 500000.0 .*transformers 5"):
        OLMO3.config_from_hf(written)
    assert OLMO3.config_from_hf(written | {"rope_theta": 5e5}).positions.theta == 5e5
    with pytest.raises(InputError, match="rope_theta is not given"):
        OLMO3.config_from_hf(written | {"rope_theta": None})
    with pytest.raises(UsageError, match=r"positions.theta_windowed is 50\.0"):
        OLMO3.config_to_hf(
            OLMO.changed(positions={"theta_windowed": 50.0}), max_position_embeddings=16
        )


def test_layers_with_a_window_have_a_base_of_their_own_and_no_scaling() -> None:
    written = dict(GEMMA3.config_to_hf(GEMMA, max_position_embeddings=16))
    bases = {kind: each["rope_theta"] for kind, each in written["rope_parameters"].items()}
    assert bases == {"full_attention": 500.0, "sliding_attention": 50.0}
    assert (written["rope_theta"], written["rope_local_base_freq"]) == (500.0, 50.0)
    config = GEMMA3.config_from_hf(written)
    assert (config.positions.theta, config.positions.theta_windowed) == (500.0, 50.0)
    bare = {key: value for key, value in written.items() if "rope" not in key}
    config = GEMMA3.config_from_hf(bare)
    assert (config.positions.theta, config.positions.theta_windowed) == (1e6, 1e4)
    scaled = GEMMA.changed(positions={"scaling": PositionInterpolation(factor=4)})
    with pytest.raises(UsageError, match=r"positions.scaling_windowed is true .*=false"):
        GEMMA3.config_to_hf(scaled, max_position_embeddings=16)
    for change, said in (
        ({"rope_local_base_freq": 60.0}, "given twice, 60.0 and 50.0"),
        ({"rope_parameters": YARN}, "rope_parameters.factor is neither"),
        ({"rope_parameters": {"sliding_attention": LINEAR}}, "sliding_attention scales"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "another scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is not given"),
    ):
        with pytest.raises(InputError) as refusal:
            GEMMA3.config_from_hf(written | change)
        assert said in str(refusal.value)


def test_a_scaling_that_names_no_old_context_means_the_positions() -> None:
    given = {key: value for key, value in YARN.items() if not key.startswith("original")}
    config = LLAMA.config_from_hf(FIELDS | {"rope_parameters": given})
    assert config.positions.scaling == YaRNScaling(factor=4, old_context_len=16, beta_fast=4)


def test_a_table_of_positions_is_no_rope() -> None:
    config = SMALL.changed(positions={"name": "learned", "max_positions": 16})
    with pytest.raises(UsageError, match="positions is learned"):
        LLAMA.config_to_hf(config)


def tables(config: DecoderConfig) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """Cosines and sines of each layer, [S, head_dim / 2]; None: without positions."""
    places = torch.arange(64)[None]
    made = [rope and rope_table(places, config.head_size, *rope) for rope in config.ropes]
    return [each and (each[0][0, :, 0], each[1][0, :, 0]) for each in made]


def their_tables(fields: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """The same of the model that transformers makes of a config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**copy.deepcopy(fields))
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    kinds = config.layer_types if hasattr(rotary, "layer_types") else [None]
    found = {}
    for kind in set(kinds):
        of_kind = () if kind is None else (kind,)
        cos, sin = rotary(torch.zeros(1), torch.arange(64)[None], *of_kind)
        found[kind] = cos[0].chunk(2, -1)[0], sin[0].chunk(2, -1)[0]
    layers = [found[kinds[n % len(kinds)]] for n in range(config.num_hidden_layers)]
    rotated = getattr(config, "no_rope_layers", None) or [1] * len(layers)
    return [each if on else None for each, on in zip(layers, rotated, strict=True)]


FORMS: dict[str, Any] = {
    "flat": flat,
    "flat, older": partial(flat, kind="type"),
    "flat, both": lambda each: {
        "rope_theta": 500.0, "rope_scaling": each | {"type": each["rope_type"]}
    },
    "flat, base within": lambda each: {"rope_scaling": each},
    "nested": lambda each: {"rope_parameters": each},
    "nested, older": lambda each: {
        "rope_parameters": {"type" if k == "rope_type" else k: v for k, v in each.items()}
    },
    "both": lambda each: flat(each) | {"rope_parameters": each},
    "both, base in one": lambda each: {
        "rope_parameters": each, "rope_scaling": flat(each)["rope_scaling"]
    },
    "by layer": lambda each: {"rope_parameters": {"full_attention": each}},
    "by layer, older": lambda each: {"rope_parameters": {"full_attention": {
        "type" if k == "rope_type" else k: v for k, v in each.items()
    }}},
    "by layer and flat": lambda each: flat(each) | {"rope_parameters": {"full_attention": each}},
    "by layer and flat, older": lambda each: flat(each, "type")
    | {"rope_parameters": {"full_attention": each}},
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "smollm3", "olmo3", "gemma2", "gemma3"])
@pytest.mark.skipif(OLD, reason="transformers 4 knows the flat forms alone")
def test_what_a_family_reads_of_rope_is_what_transformers_makes_of_it(name: str) -> None:
    written = hf_fields(hf_model(name))
    base = {key: value for key, value in written.items() if not key.startswith("rope_")}
    if name == "olmo3":
        base["rope_theta"] = 500_000.0
    family, read = family_of_hf(base), 0
    for parameters, _ in SCALINGS:
        for form, of in FORMS.items():
            theta = base.get("rope_theta", parameters["rope_theta"])
            fields = base | of(parameters | {"rope_theta": theta})
            try:
                ours = tables(family.config_from_hf(fields))
            except InputError:
                continue
            read += 1
            theirs = their_tables(fields)
            assert len(theirs) == len(ours)
            for one, two in zip(ours, theirs, strict=True):
                assert (one is None) == (two is None), (form, parameters)
                if one is not None and two is not None:
                    torch.testing.assert_close(one, two, msg=f"{form}, {parameters}")
    assert read >= 6
