"""Presets: sizes are what their names say."""

from __future__ import annotations

import pytest

from olm_data.errors import UsageError
from olm_train.model.presets import PRESETS, preset


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_presets_name_lies_between_its_sizes(name: str) -> None:
    config = preset(name, vocab_size=50_304, tie_embeddings=True)
    number, unit = name.removeprefix("olm-")[:-1], name[-1]
    nominal = float(number) * {"m": 1e6, "b": 1e9}[unit]
    assert 0.9 * config.num_non_embedding_params <= nominal <= 1.1 * config.num_params


def test_any_field_can_be_overridden() -> None:
    config = preset("olm-1m", vocab_size=1000, n_layers=2, qk_norm="head")
    assert (config.vocab_size, config.n_layers, config.qk_norm) == (1000, 2, "head")
    assert config.d_model == PRESETS["olm-1m"]["d_model"]


def test_unknown_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError) as refusal:
        preset("olm-1mm", vocab_size=1000)
    assert "olm-1m" in str(refusal.value)
