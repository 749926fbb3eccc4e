"""The decoder: documents are isolated, options have their effect, sizes are what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import make_batch

from olm_data.errors import UsageError
from olm_train.model.decoder import Decoder, DecoderConfig
from olm_train.model.init import init_parameters
from olm_train.model.loss import count_valid, cross_entropy_sum

CONFIG = DecoderConfig(vocab_size=50, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, qk_norm=True)


def build(config: DecoderConfig, seed: int = 0) -> Decoder:
    model = config.build()
    init_parameters(model, seed)
    return model


def test_a_row_of_one_document_is_plain_causal_attention() -> None:
    model = build(CONFIG)
    batch = make_batch([[48], [48]], vocab_size=50)
    packed = model(batch.input_ids, doc_start=batch.doc_start, positions=batch.positions)
    torch.testing.assert_close(packed, model(batch.input_ids), rtol=1e-5, atol=1e-6)


@settings(max_examples=20)
@given(st.lists(st.integers(2, 20), min_size=1, max_size=5), st.integers(0, 100))
def test_packed_loss_is_the_token_weighted_loss_of_the_documents_alone(
    lengths: list[int], seed: int
) -> None:
    model = build(CONFIG)
    batch = make_batch([lengths], vocab_size=50, seed=seed)
    with torch.no_grad():
        logits = model(batch.input_ids, doc_start=batch.doc_start, positions=batch.positions)
        packed = cross_entropy_sum(logits, batch.labels) / count_valid(batch.labels)
        alone = torch.zeros((), dtype=torch.float64)
        for start, length in zip(
            [sum(lengths[:i]) for i in range(len(lengths))], lengths, strict=True
        ):
            ids, labels = (x[:, start : start + length] for x in (batch.input_ids, batch.labels))
            alone += cross_entropy_sum(model(ids), labels)
    assert abs(packed - alone / count_valid(batch.labels)) < 1e-6


def test_no_gradient_flows_from_one_document_to_another() -> None:
    model = build(CONFIG)
    batch = make_batch([[20, 12, 16]], vocab_size=50)
    embedded: list[torch.Tensor] = []
    model.embeddings.register_forward_hook(
        lambda _module, _args, output: (output.retain_grad(), embedded.append(output))[1]
    )
    logits = model(batch.input_ids, doc_start=batch.doc_start, positions=batch.positions)
    cross_entropy_sum(logits[:, 20:32], batch.labels[:, 20:32]).backward()
    gradient = embedded[0].grad
    assert gradient is not None
    assert gradient[:, 20:31].abs().sum(-1).min() > 0  # position 31 has no label after it
    assert (gradient[:, :20] == 0).all()
    assert (gradient[:, 32:] == 0).all()


@pytest.mark.parametrize(
    "change",
    [
        {"n_kv_heads": None},
        {"n_kv_heads": 1},
        {"head_dim": 16},
        {"hidden_size": 40},
        {"qk_norm": False},
        {"tie_embeddings": True},
    ],
    ids=str,
)
def test_stated_parameter_counts_are_the_models(change: dict[str, object]) -> None:
    config = replace(CONFIG, **change)  # type: ignore[arg-type]
    model = config.build(device="meta")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sum(sizes.values()) == config.num_params
    tables = sum(sizes.get(name, 0) for name in ("embeddings.weight", "lm_head.weight"))
    assert sum(sizes.values()) - tables == config.num_non_embedding_params


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 100.0},
        {"norm_eps": 0.1},
        {"qk_norm": False},
        {"tie_embeddings": True},
        {"init_std": 0.05},
        {"n_kv_heads": 4},
        {"hidden_size": 40},
        {"head_dim": 16},
    ],
    ids=str,
)
def test_each_option_has_an_effect(change: dict[str, object]) -> None:
    ids = make_batch([[16]], vocab_size=50).input_ids
    with torch.no_grad():
        changed = build(replace(CONFIG, **change))(ids)  # type: ignore[arg-type]
        assert not torch.equal(changed, build(CONFIG)(ids))


def test_rotary_positions_are_relative() -> None:
    model = build(CONFIG)
    ids = make_batch([[16]], vocab_size=50).input_ids
    positions = torch.arange(16)[None]
    with torch.no_grad():
        shifted = model(ids, positions=positions + 100)
        torch.testing.assert_close(shifted, model(ids, positions=positions), rtol=1e-4, atol=1e-5)
        stretched = model(ids, positions=positions * 3)
    assert not torch.allclose(shifted, stretched, atol=1e-4)


def test_compute_dtype_reaches_the_logits_and_leaves_the_weights() -> None:
    model = build(CONFIG)
    batch = make_batch([[20, 12]], vocab_size=50)
    full = model(batch.input_ids, doc_start=batch.doc_start, positions=batch.positions)
    model.compute_dtype = torch.bfloat16
    logits = model(batch.input_ids, doc_start=batch.doc_start, positions=batch.positions)
    assert logits.dtype == torch.bfloat16
    cross_entropy_sum(logits, batch.labels).backward()
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
    torch.testing.assert_close(logits.float(), full, rtol=0.05, atol=0.02)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"n_heads": 5}, "n_heads"),
        ({"n_kv_heads": 3}, "n_kv_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"n_layers": 0}, "n_layers"),
        ({"attention": "varlan"}, "attention"),
    ],
)
def test_impossible_shapes_are_refused_by_name(change: dict[str, object], where: str) -> None:
    with pytest.raises(UsageError) as refusal:
        replace(CONFIG, **change)  # type: ignore[arg-type]
    assert where in str(refusal.value)
