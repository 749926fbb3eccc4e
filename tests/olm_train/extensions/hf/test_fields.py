"""A config.json is read field by field: what is wrong or unknown is named, none is passed over."""

from __future__ import annotations

from typing import Any

import pytest

from olm_data.errors import InputError, UsageError
from olm_train.extensions.hf.table import LLAMA
from olm_train.model.config import DecoderConfig

SMALL = DecoderConfig(vocab_size=9, d_model=8, n_layers=1, n_heads=2)
FIELDS = dict(LLAMA.config_to_hf(SMALL, max_position_embeddings=16))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": "8"}, "hidden_size is 8, which is not of the right type"),
        ({"hidden_size": True}, "hidden_size is true, which is not of the right type"),
        ({"num_hidden_layers": 1 << 60}, "n_layers"),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide the 2 query heads"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu: the activation is SiLU"),
        ({"mlp_bias": 1}, "mlp_bias is 1"),
        ({"softmax_sink": 4}, "softmax_sink is 4, and is not known here"),
        ({"add_cross_attention": True}, "add_cross_attention is true"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "own.py"}}, "auto_map"),
        ({"initializer_range": 2.0}, "initializer_range is 2.0"),
    ],
)
def test_what_our_decoder_is_not_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refusal:
        LLAMA.config_from_hf(FIELDS | change)
    assert said in str(refusal.value).replace("'", "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": -1}, "hidden_size is at least 1 and at most 262,144, not -1"),
        ({"hidden_size": 9}, "num_attention_heads is 2, which does not divide hidden_size"),
        ({"intermediate_size": 0}, "intermediate_size is at least 1 and at most 2,097,152, not 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is at least 1"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is above 0, not -1.0"),
        ({"initializer_range": -1.0}, "initializer_range is above 0, not -1.0"),
        ({"rope_theta": -5.0, "rope_parameters": None}, "rope_theta is above 0, not -5.0"),
    ],
)
def test_what_is_wrong_is_said_of_the_field_that_was_given(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError) as error:
        LLAMA.config_from_hf(FIELDS | change)
    assert f"LlamaForCausalLM: {said}" in error.value.what
    assert not {"d_model", "n_heads", "DecoderConfig"} & set(error.value.what.split())


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(InputError) as refusal:
        LLAMA.config_from_hf(FIELDS | {"hidden_act": "gelu", "one": 1, "two": 2})
    assert all(name in str(refusal.value) for name in ("hidden_act", "one is 1", "two is 2"))


@pytest.mark.parametrize(
    "change",
    [
        {"attention_dropout": 0.1, "use_cache": False, "torch_dtype": "bfloat16", "top_p": 0.9},
        {"is_encoder_decoder": False, "pruned_heads": {}, "something": None},
        {"vocab_size": 9.0},
    ],
)
def test_what_changes_nothing_is_no_matter(change: dict[str, Any]) -> None:
    assert LLAMA.config_from_hf(FIELDS | change) == LLAMA.config_from_hf(FIELDS)


def test_documents_may_be_of_any_length_but_it_must_be_said() -> None:
    with pytest.raises(UsageError, match="max_position_embeddings is not given"):
        LLAMA.config_to_hf(SMALL)
