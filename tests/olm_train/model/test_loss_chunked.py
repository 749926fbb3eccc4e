"""A loss in chunks: gradients in fp64 equal differences. As the plain one: test_loss.py."""

from __future__ import annotations

import pytest
import torch
from support.batches import make_batch
from support.model_options import CONFIG

from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.model.loss import loss_sums
from olm_train.model.loss_chunked import chunked_loss


@pytest.mark.parametrize("weights", [None, torch.tensor([[3, 1, 1, 3, 1, 2, 2, 5]])])
@pytest.mark.parametrize("chunked", [False, True])
def test_gradients_in_fp64_equal_differences(chunked: bool, weights: torch.Tensor | None) -> None:
    model = Decoder(CONFIG.changed(attention={"qk_norm": "head"}), dtype=torch.float64)
    init_parameters(model, 0)
    batch = make_batch([[5, 3]], vocab_size=50)

    def sums(logits, labels, weights):  # type: ignore[no-untyped-def]
        return loss_sums(logits, labels, 1e-4, weights)

    chunks = chunked_loss(sums, 3)

    def loss() -> torch.Tensor:
        def reduce(head, x):  # type: ignore[no-untyped-def]
            if chunked:
                return chunks(head, x, batch.labels, weights)
            return sums(head.logits(x), batch.labels, weights)

        return model(
            batch.input_ids, doc_start=batch.doc_start, positions=batch.positions, reduce=reduce
        ).total

    total = loss()
    assert total.dtype == torch.float64
    total.backward()
    step = 1e-5
    for parameter in (model.norm.weight, next(model.blocks[0].parameters())):
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
