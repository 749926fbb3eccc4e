"""Models of transformers as ours and back, and each row of the table against their classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.batches import make_batch
from support.hf_models import (
    MODELS,
    OLD,
    both,
    hf_fields,
    hf_model,
    hf_tensors,
    ours_of,
    take_over,
    theirs_of,
)

from olm_data.errors import InputError
from olm_train.extensions.hf.attention import LayerWindows, OneWindow, QueryScale
from olm_train.extensions.hf.family import Family
from olm_train.extensions.hf.fields import REQUIRED, FixedValue, Number
from olm_train.extensions.hf.positions import EqualRope, LayerRope, NoRope, TableSize
from olm_train.extensions.hf.table import FAMILIES, GPT2, LLAMA, family_of_hf
from olm_train.model.decoder import Decoder
from olm_train.model.loss import loss_sums

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in MODELS), ("llama", torch.float32)]
)
def test_every_byte_of_their_tensors_comes_back(name: str, dtype: torch.dtype) -> None:
    theirs = hf_model(name).to(dtype)
    family, ours = as_ours(theirs)
    before, after = hf_tensors(theirs), theirs_of(family, ours)
    assert sorted(before) == sorted(after)
    for key, value in before.items():
        assert value.dtype == after[key].dtype == dtype
        assert torch.equal(value.view(torch.uint8), after[key].view(torch.uint8)), key


def as_ours(theirs: Any) -> tuple[Family, Decoder]:
    family = family_of_hf(hf_fields(theirs))
    return family, ours_of(family, family.config_from_hf(hf_fields(theirs)), hf_tensors(theirs))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_transformers_reads_what_we_write_as_the_same_model(name: str) -> None:
    theirs, family, ours = both(name)
    written = dict(family.config_to_hf(ours.config, max_position_embeddings=64))
    ids = torch.randint(ours.config.vocab_size, (2, 40))
    kind = type(theirs.config)
    again = type(theirs)(kind.from_dict(written)).eval()
    again.config._attn_implementation = "eager"
    tensors = theirs_of(family, ours)
    assert sorted(tensors) == sorted(hf_tensors(again))
    take_over(again, tensors)
    torch.testing.assert_close(again(ids).logits, ours(ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "qwen3_moe windows"])
@torch.no_grad()
def test_the_loss_of_a_packed_row_is_that_of_its_documents_alone(name: str) -> None:
    theirs, _, ours = both(name)
    lengths = [23, 17]
    batch = make_batch([lengths], vocab_size=ours.config.vocab_size)
    logits = ours(batch.input_ids, doc_start=batch.doc_start, positions=batch.positions)
    packed = loss_sums(logits, batch.labels, None).total
    alone, start = torch.zeros(()), 0
    for length in lengths:
        ids, labels = (x[:, start : start + length] for x in (batch.input_ids, batch.labels))
        alone += F.cross_entropy(theirs(ids).logits[0], labels[0], reduction="sum")
        start += length
    torch.testing.assert_close(packed.float(), alone, atol=1e-4, rtol=1e-6)


def stored(family: Family, name: str) -> tuple[Decoder, set[str]]:
    theirs, _, ours = both(name)
    assert type(theirs).__name__ == family.architecture
    return ours, set(hf_tensors(theirs))


def test_files_of_a_model_without_its_head_and_with_old_buffers_are_read() -> None:
    ours, names = stored(GPT2, "gpt2")
    bare = {name.removeprefix("transformer.") for name in names}
    found = GPT2.stored_names(ours.config, bare | {"h.0.attn.bias", "h.1.attn.masked_bias"})
    assert set(found) == names
    assert set(found.values()) == bare
    with pytest.raises(InputError, match=r"1 of no parameter \(h.9.attn.c_attn.bias\)"):
        GPT2.stored_names(ours.config, bare | {"h.9.attn.c_attn.bias"})
    rope = {"model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"}
    ours, names = stored(LLAMA, "llama")
    assert LLAMA.stored_names(ours.config, names | rope) == {name: name for name in names}


def class_defaults(family: Family) -> Any:
    """The configuration of a model of which no field is given."""
    return getattr(transformers, family.architecture).config_class()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_absent_fields_mean_what_they_mean_to_transformers(family: Family) -> None:
    default = class_defaults(family)
    assert default.model_type == family.model_type
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
