"""Back-ends without a backward pass on a CPU, such as flex, agree with a loop over queries."""

from __future__ import annotations

import pytest
import torch
from support.attention_loop import ROWS, cpu_backends, inputs, layout_of, varlen_loop
from support.batches import make_batch

from olm_train.model.attention import attention_backend
from olm_train.model.attention_backend import DocumentLayout, Scores

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("window", "scores"),
    [(None, Scores()), (7, Scores(0.4)), (None, Scores(None, 0.7)), (7, Scores(0.4, 0.7))],
)
@pytest.mark.parametrize("name", cpu_backends(training=False))
def test_backend_agrees_with_a_loop_over_queries(
    name: str, window: int | None, scores: Scores
) -> None:
    batch, backend = make_batch(ROWS, vocab_size=2), attention_backend(name)
    left = -1 if window is None else window - 1
    whole = DocumentLayout.whole_rows(3, 64, CPU)
    if window is not None:
        whole = whole._replace(doc_start=torch.zeros(3, 64, dtype=torch.int32))
    for layout in (layout_of(batch), whole):
        q, k, v = inputs(2)
        out = backend.attend(q, k, v, backend.prepare(layout._replace(window=window)), scores)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        expected = varlen_loop(*flat, *layout.offsets(), left, scores).view(out.shape)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
