"""Cross entropy sums: ignored labels count for nothing, also where all are ignored."""

from __future__ import annotations

import torch

from olm_train.model.loss import count_valid, cross_entropy_by_label, cross_entropy_sum


def test_sum_is_the_log_probability_of_the_valid_labels() -> None:
    logits = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, -100, 3, -100], [-100, 10, 0, 0, 4]])
    logp = logits.double().log_softmax(-1)
    expected = -sum(
        logp[i, j, labels[i, j]] for i in range(2) for j in range(5) if labels[i, j] >= 0
    )
    torch.testing.assert_close(cross_entropy_sum(logits, labels).double(), expected)
    torch.testing.assert_close(
        cross_entropy_by_label(logits, labels).sum(dtype=torch.float64), expected
    )
    assert count_valid(labels) == 7


def test_no_valid_label_gives_zero_loss_and_zero_gradient() -> None:
    logits = torch.randn(1, 4, 7, requires_grad=True)
    loss = cross_entropy_sum(logits, torch.full((1, 4), -100))
    loss.backward()
    assert loss == 0
    assert logits.grad is not None
    assert (logits.grad == 0).all()
