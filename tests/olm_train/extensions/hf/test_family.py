"""Models of transformers as ours: equal logits, and every byte of their tensors comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.batches import make_batch
from support.hf_models import (
    MODELS,
    both,
    hf_fields,
    hf_model,
    hf_tensors,
    ours_of,
    take_over,
    theirs_of,
)

from olm_data.errors import InputError
from olm_train.extensions.generate.runner import CachedRunner
from olm_train.extensions.hf.family import Family
from olm_train.extensions.hf.table import GPT2, LLAMA, family_of_hf
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.loss import loss_sums

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transformers")]

LENGTHS = (5, 40)
"""Tokens of the prompts: one within the window, one beyond it and beyond the old context."""


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_and_greedy_text_are_those_of_transformers(name: str) -> None:
    theirs, _, ours = both(name)
    for length in LENGTHS:
        ids = torch.randint(ours.config.vocab_size, (2, length))
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=1e-5)
    prompt = ids[:1, :7]
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    text = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert greedy(ours, prompt[0].tolist(), 16) == text[0].tolist()


def greedy(model: Decoder, ids: list[int], tokens: int) -> list[int]:
    """Write the likeliest tokens, with the cache."""
    runner = CachedRunner(model, torch.device("cpu"))
    logits = runner.prefill([ids])[0]
    for _ in range(tokens):
        ids = [*ids, int(logits[0].argmax())]
        logits = runner.decode(ids[-1:])
    return ids


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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


@pytest.mark.parametrize("name", MODELS)
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


def test_a_copy_of_a_tied_table_may_be_there() -> None:
    ours, names = stored(LLAMA, "llama tied, one kv head")
    assert "lm_head.weight" not in names
    assert LLAMA.stored_names(ours.config, names | {"lm_head.weight"}) == {n: n for n in names}
    (table,) = [each for each in LLAMA.tensors(ours.config) if each.copies]
    assert (table.ours, table.copies) == ("embeddings.weight", ("lm_head.weight",))


def test_missing_and_unknown_tensors_are_named() -> None:
    ours, names = stored(LLAMA, "llama")
    with pytest.raises(InputError) as refusal:
        LLAMA.stored_names(ours.config, names - {"model.norm.weight"} | {"model.layers.0.bonus"})
    assert "1 missing (model.norm.weight), 1 of no parameter (model.layers.0.bonus)" in str(
        refusal.value
    )


def test_rows_that_pad_a_vocabulary_are_not_theirs() -> None:
    theirs, family, ours = both("llama")
    padded = ours_of(family, replace(ours.config, vocab_multiple=16), hf_tensors(theirs))
    assert padded.embeddings.weight.shape == (64, 32)
    assert not padded.embeddings.weight[61:].any()
    for name, value in theirs_of(family, padded).items():
        assert torch.equal(value, hf_tensors(theirs)[name]), name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": -1}, "hidden_size is at least 1 and at most 262,144, not -1"),
        ({"hidden_size": 65}, "num_attention_heads is 2, which does not divide hidden_size"),
        ({"intermediate_size": 0}, "intermediate_size is at least 1 and at most 2,097,152, not 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is at least 1"),
        ({"num_key_value_heads": 7}, "num_key_value_heads 7 does not divide the 2 query heads"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is at least 1"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is above 0, not -1.0"),
        ({"initializer_range": -1.0}, "initializer_range is above 0, not -1.0"),
        ({"rope_theta": -5.0, "rope_parameters": None}, "rope_theta is above 0, not -5.0"),
    ],
)
def test_what_is_wrong_is_said_of_the_field_that_was_given(
    change: dict[str, Any], said: str
) -> None:
    shape = DecoderConfig(
        vocab_size=9, d_model=64, n_layers=1, n_heads=2, attention={"qk_norm": None}
    )
    fields = {**LLAMA.config_to_hf(shape, max_position_embeddings=16), **change}
    with pytest.raises(InputError) as error:
        LLAMA.config_from_hf(fields)
    assert f"LlamaForCausalLM: {said}" in error.value.what
    assert not {"d_model", "n_heads", "DecoderConfig"} & set(error.value.what.split())
