"""Windows: the list of layers counts, older rules are read, and written where they say the same."""

from __future__ import annotations

from typing import Any

import pytest

from olm_data.errors import InputError, UsageError
from olm_train.extensions.hf.attention import FULL, SLIDING, interval_of
from olm_train.extensions.hf.table import GEMMA3, MISTRAL, OLMO3, QWEN3, SMOLLM3
from olm_train.model.config import DecoderConfig

S, F = SLIDING, FULL
SIZES: dict[str, Any] = {"vocab_size": 9, "d_model": 16, "n_layers": 4, "n_heads": 2}


def qwen(**windows: Any) -> Any:
    config = DecoderConfig(**SIZES, attention={"qk_norm": "head"})
    written = QWEN3.config_to_hf(config, max_position_embeddings=64)
    left = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")
    return {key: value for key, value in written.items() if key not in left} | windows


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ({}, None),
        ({"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}, None),
        ({"use_sliding_window": True, "sliding_window": None}, None),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, (-1, -1, 8, 8)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096,)),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": [S, F, S, F]}, (8, -1)),
        ({"use_sliding_window": True, "sliding_window": 8, "layer_types": [F] * 4}, None),
    ],
)
def test_qwens_windows(windows: dict[str, Any], expected: tuple[int, ...] | None) -> None:
    assert QWEN3.config_from_hf(qwen(**windows)).attention.sliding_window == expected


@pytest.mark.parametrize(
    ("windows", "said"),
    [
        ({"layer_types": [S, F, F, F], "sliding_window": 8}, "use_sliding_window is false"),
        ({"layer_types": [F]}, "layer_types is not a"),
        ({"num_hidden_layers": 1 << 60}, "num_hidden_layers is"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types is not a"),
        ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "at least 1"),
    ],
)
def test_windows_that_readers_take_for_different_ones(windows: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refusal:
        QWEN3.config_from_hf(qwen(**windows))
    assert said in str(refusal.value)


def test_the_rule_of_late_layers_is_written_where_it_holds() -> None:
    for windows, first in (((-1, -1, 8, 8), 2), ((8, -1), 4), ((8,), 0), (None, 4)):
        config = DecoderConfig(**SIZES, attention={"qk_norm": "head", "sliding_window": windows})
        written = QWEN3.config_to_hf(config, max_position_embeddings=64)
        assert written["max_window_layers"] == first
        assert written["use_sliding_window"] == (windows is not None)


def test_the_pattern_of_gemma_is_written_where_it_holds_and_must_agree() -> None:
    gemma: dict[str, Any] = {
        **SIZES, "block": "peri_norm", "feed_forward": "geglu", "embed_scale": 4.0,
        "norm": {"zero_centred": True},
    }  # fmt: skip
    for windows, every in (((8, -1), 2), ((8, 8, 8, -1), 4), ((8,), 5), (None, 1), ((-1, 8), None)):
        config = DecoderConfig(**gemma, attention={"qk_norm": "head", "sliding_window": windows})
        written = {**GEMMA3.config_to_hf(config, max_position_embeddings=64)}
        assert written.get("sliding_window_pattern") == every
        assert written["sliding_window"] == (4096 if windows is None else 8)
        if every is not None:
            del written["layer_types"]
            assert GEMMA3.config_from_hf(written).windows == config.windows
            with pytest.raises(InputError, match="sliding_window_pattern says another thing"):
                GEMMA3.config_from_hf(written | {"layer_types": [F, S, S, S]})


def test_mistrals_window_is_of_all_layers() -> None:
    config = DecoderConfig(**SIZES, attention={"sliding_window": (8,)})
    written = MISTRAL.config_to_hf(config, max_position_embeddings=64)
    assert MISTRAL.config_from_hf(written).attention.sliding_window == (8,)
    assert (
        MISTRAL.config_from_hf({**written, "sliding_window": None}).attention.sliding_window is None
    )
    with pytest.raises(InputError, match="layer_types differs"):
        MISTRAL.config_from_hf({**written, "layer_types": [S, F, S, F]})
    with pytest.raises(UsageError, match=r"sliding_window is not of all layers .*\[8\]"):
        MISTRAL.config_to_hf(
            DecoderConfig(**SIZES, attention={"sliding_window": (8, -1)}),
            max_position_embeddings=64,
        )


def test_windows_of_several_sizes_are_refused() -> None:
    olmo = DecoderConfig(
        **SIZES,
        attention={"sliding_window": (8, 4), "qk_norm": "full"},
        block="reordered_norm",
        positions={"theta": 5e5},
    )
    for family in (OLMO3, SMOLLM3):
        with pytest.raises(UsageError, match=r"several sizes, \[4, 8\] .*8 in all"):
            family.config_to_hf(olmo, max_position_embeddings=64)


def test_smollms_windows_are_those_of_layers_without_positions() -> None:
    config = DecoderConfig(
        **SIZES, positions={"no_rope_layer_interval": 2}, attention={"sliding_window": (-1, 8)}
    )
    written = {**SMOLLM3.config_to_hf(config, max_position_embeddings=64)}
    del written["layer_types"]
    assert SMOLLM3.config_from_hf(written).windows == (None, 8, None, 8)
    del written["no_rope_layers"]
    assert SMOLLM3.config_from_hf(written).windows == (None, 8, None, 8)


@pytest.mark.parametrize(
    ("marked", "interval"),
    [([0, 1, 0, 1], 2), ([0, 0, 0], 4), ([1, 1], 1), ([0, 1, 1], None), ([0, 0, 1, 0], 3)],
)
def test_an_interval_is_of_every_such_layer(marked: list[int], interval: int | None) -> None:
    assert interval_of([bool(each) for each in marked]) == interval
