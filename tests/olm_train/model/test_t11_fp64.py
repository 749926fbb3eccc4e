"""T11: a model in fp64 computes in fp64, from the angles of its positions to its loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.batches import make_batch
from support.model_options import CONFIG

from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.model.loss import loss_sums
from olm_train.model.loss_chunked import chunked_loss
from olm_train.model.rope import Llama3Scaling, PositionInterpolation, YaRNScaling, rope_table


@pytest.mark.parametrize("chunked", [False, True])
def test_t11_gradients_in_fp64_equal_differences(chunked: bool) -> None:
    model = Decoder(replace(CONFIG, qk_norm="head"), dtype=torch.float64)
    init_parameters(model, 0)
    batch = make_batch([[5, 3]], vocab_size=50)

    def sums(logits: torch.Tensor, labels: torch.Tensor):  # type: ignore[no-untyped-def]
        return loss_sums(logits, labels, 1e-4)

    chunks = chunked_loss(sums, 3)

    def loss() -> torch.Tensor:
        def reduce(head, x):  # type: ignore[no-untyped-def]
            return chunks(head, x, batch.labels) if chunked else sums(head.logits(x), batch.labels)

        return model(
            batch.input_ids, doc_start=batch.doc_start, positions=batch.positions, reduce=reduce
        ).total

    total = loss()
    assert total.dtype == torch.float64
    total.backward()
    step = 1e-5
    for parameter in (model.norm.weight, next(model.blocks[0].parameters())):
        assert parameter.grad is not None
        place = (0,) * parameter.ndim
        with torch.no_grad():
            found = []
            for sign in (1, -1):
                parameter[place] += sign * step
                found.append(loss())
                parameter[place] -= sign * step
        slope = (found[0] - found[1]) / (2 * step)
        # In fp32 the two losses differ by no more than their rounding.
        assert float(parameter.grad[place]) == pytest.approx(float(slope), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        PositionInterpolation(factor=4.0),
        Llama3Scaling(factor=8.0, old_context_len=64),
        YaRNScaling(factor=8.0, old_context_len=64),
    ],
    ids=lambda scaling: getattr(scaling, "name", "none"),
)
def test_t11_angles_are_those_of_the_model_s_dtype(scaling: YaRNScaling | None) -> None:
    positions = torch.arange(4000)[None]
    for dtype, error in ((torch.float64, 1e-12), (torch.bfloat16, 1e-3)):
        cos, sin = rope_table(positions, 16, 10_000.0, scaling, dtype)
        assert cos.dtype == sin.dtype == torch.promote_types(dtype, torch.float32)
        size = scaling.attention_factor if scaling else 1.0
        ones = (cos.double() ** 2 + sin.double() ** 2) / size**2
        assert float((ones - 1).abs().max()) < error
