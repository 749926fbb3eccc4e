"""Fault 63: a masking leak. Promise: change document A, and B's logits keep their bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.attention_loop import cpu_backends, loop_backend
from support.batches import make_batch
from support.model_options import FAMILIES, stirred

from olm_train.model.attention import ATTENTION_BACKENDS
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters

CONFIG = DecoderConfig(vocab_size=64, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2)
LENGTHS = [[30, 1, 17, 48], [96], [50, 46]]
BOUNDS = [[0, 30, 31, 48, 96], [0, 96], [0, 50, 96]]


@pytest.fixture(autouse=True)
def reference() -> Iterator[None]:
    with loop_backend():
        yield


def logits(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    batch = make_batch(LENGTHS, vocab_size=64)
    with torch.no_grad():
        return model(
            ids,
            doc_start=batch.doc_start,
            positions=batch.positions,
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
        )


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (backend, dtype)
        for backend in [*cpu_backends(training=False), "loop"]
        for dtype in (torch.float32, torch.bfloat16)
        if backend != "flex" or dtype is torch.float32  # seconds each, the same mask
    ],
)
def test_changing_any_token_of_a_document_keeps_every_other_documents_logits(
    backend: str, dtype: torch.dtype
) -> None:
    model = Decoder(CONFIG.changed(attention={"backend": backend}))
    init_parameters(model, seed=3)
    model.compute_dtype = dtype
    check_isolation(model, reach=96)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_way_to_give_positions_and_windows_keeps_documents_apart(family: str) -> None:
    model = stirred(CONFIG.changed(**FAMILIES[family]))
    # Gemma 2's windows here are 7, 3 and 7: a change reaches 6 + 2 + 6 tokens ahead, no further.
    check_isolation(model, reach=14 if family == "Gemma 2" else 96)


def check_isolation(model: Decoder, *, reach: int) -> None:
    """Change tokens; only logits of the same document, at most `reach` ahead, may change."""
    ids = make_batch(LENGTHS, vocab_size=64).input_ids
    before = logits(model, ids)
    for row, bounds in enumerate(BOUNDS):
        for start, end in itertools.pairwise(bounds):
            for place in {start, (start + end) // 2, end - 1}:
                changed = ids.clone()
                changed[row, place] = (changed[row, place] + 1) % 64
                after = logits(model, changed)
                same = (after == before).all(-1)  # [b, S]
                assert not same[row, place]
                same[row, place : min(end, place + reach + 1)] = True
                assert same.all(), (row, place)


def test_the_check_sees_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ATTENTION_BACKENDS["sdpa"]
    leaking = replace(plain, prepare=lambda _layout: None)  # plain causal over the whole row
    monkeypatch.setitem(ATTENTION_BACKENDS, "leaking", leaking)
    model = Decoder(CONFIG.changed(attention={"backend": "leaking"}))
    init_parameters(model, seed=3)
    ids = make_batch(LENGTHS, vocab_size=64).input_ids
    changed = ids.clone()
    changed[0, 3] = (changed[0, 3] + 1) % 64
    assert not torch.equal(logits(model, ids)[0, 31:], logits(model, changed)[0, 31:])
