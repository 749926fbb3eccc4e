"""Presets: the published shapes, by the number of their parameters; ours are what they say."""

from __future__ import annotations

import pytest

from olm_data.config.convert import parse
from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.presets import PRESETS, depth_fields, preset, preset_fields

OURS = [name for name, known in PRESETS.items() if known.parameters is None]
PUBLISHED = [name for name in PRESETS if name not in OURS]


@pytest.mark.parametrize("name", OURS)
def test_a_presets_name_lies_between_its_sizes(name: str) -> None:
    config = preset(name, vocab_size=50_304, head={"tied": True})
    number, unit = name.rpartition("-")[2][:-1], name[-1]
    nominal = float(number) * {"m": 1e6, "b": 1e9}[unit]
    assert 0.9 * config.num_non_embedding_params <= nominal <= 1.1 * config.num_params


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_has_the_published_number_of_parameters(name: str) -> None:
    known = PRESETS[name]
    config = preset(name, vocab_size=known.vocab_size)
    assert config.num_params == known.parameters
    built = sum(p.numel() for p in Decoder(config, device="meta").parameters())
    assert built == known.parameters
    assert known.source.startswith("huggingface.co/")


@pytest.mark.parametrize("name", PRESETS)
def test_plain_fields_and_the_config_say_the_same(name: str) -> None:
    plain = {**preset_fields(name), "vocab_size": 1024}
    assert parse(DecoderConfig, Values(plain)) == preset(name, vocab_size=1024)


def test_any_field_can_be_overridden() -> None:
    config = preset("olm-1m", vocab_size=1000, n_layers=2, attention={"qk_norm": "head"})
    assert (config.vocab_size, config.n_layers, config.attention.qk_norm) == (1000, 2, "head")
    assert config.d_model == PRESETS["olm-1m"].fields["d_model"]


def test_unknown_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="olm-1m"):
        preset("olm-1mm", vocab_size=1000)


def test_parameters_grow_with_depth() -> None:
    sizes = [
        DecoderConfig(**depth_fields(depth), vocab_size=512).num_non_embedding_params
        for depth in range(1, 33)
    ]
    assert sizes == sorted(set(sizes))
