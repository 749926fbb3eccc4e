"""Continuations given as ids: each scored as alone, told as soon as it is known, or refused."""

from __future__ import annotations

import pytest
import torch
from support.hf_twin import plain_llama

from olm_data.errors import UsageError
from olm_train.extensions.harness.model import CHUNK, Answer, answers, rows_of

CPU = torch.device("cpu")


def test_answers_come_in_order_and_are_told_as_soon_as_they_are_known() -> None:
    model = plain_llama(50)
    pairs = [([n + 1] * (1 + n % 3), [n + 2, n + 3][: 1 + n % 2]) for n in range(12)]
    told: dict[int, Answer] = {}

    def keep(number: int, answer: Answer) -> None:
        told[number] = answer

    rows = rows_of(pairs, 9, 2, CPU)
    found = answers(model, rows, CPU, keep, quiet=True)
    assert rows.rows < len(pairs)
    assert [told[number] for number in range(len(pairs))] == found
    for (context, continuation), (log_p, greedy) in zip(pairs, found, strict=True):
        ids = torch.tensor([context + continuation])
        with torch.no_grad():
            logits = model(ids[:, :-1])[0, len(context) - 1 :].double()
        wanted = torch.tensor(continuation)
        expected = logits.log_softmax(-1).gather(1, wanted[:, None]).sum()
        assert log_p == pytest.approx(expected.item(), rel=1e-5)
        assert greedy == bool((logits.argmax(-1) == wanted).all())


def test_a_continuation_of_more_tokens_than_a_chunk_is_whole() -> None:
    model = plain_llama(50)
    ids = [n % 50 for n in range(CHUNK + 40)]
    ((log_p, _),) = answers(model, rows_of([([3], ids)], 2 * CHUNK, 1, CPU), CPU, quiet=True)
    with torch.no_grad():
        logits = model(torch.tensor([[3, *ids[:-1]]]))[0].double()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum().item()
    assert log_p == pytest.approx(expected, rel=1e-5)


def test_a_continuation_that_does_not_fit_is_refused() -> None:
    assert rows_of([([1] * 9, [2] * 5)], 5, 1, CPU).lost.tolist() == [8]
    with pytest.raises(UsageError, match="a continuation has 6 tokens, and the model looks at 5"):
        rows_of([([1] * 9, [2] * 5), ([1], [2] * 6)], 5, 1, CPU)
