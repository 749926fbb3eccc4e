"""Each rule, request by request, beside a plain loop over a Llama of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ai2_wheel import real_wheel
from support.eval_requests import make_task, one_by_one, plain_scores
from support.hf_twin import plain_llama, twin

from olm_data.dataset.eval_set import EvalSet, Primary
from olm_data.extensions.eval_sets.tasks import Task, build, read_ai2
from olm_data.tokenizer.tokenizer import load_tokenizer
from olm_train.extensions.downstream.evaluation import losses_of
from olm_train.extensions.downstream.tasks import TaskRequests

LENGTH = 48
"""Tokens of a row: some made-up requests are longer."""


def compare(eval_set: EvalSet, length: int, rows: int = 3) -> dict[str, np.ndarray[Any, Any]]:
    """Check the scores of packed rows against the loop, and return them."""
    model = plain_llama(eval_set.info.tokenizer.vocab_size)
    theirs = twin(model)
    log_p = one_by_one(lambda ids: theirs(ids).logits, eval_set.folder, length)
    r = eval_set.requests
    lost = np.maximum(r.ends - r.starts - 1 - length, 0)
    cut = set(np.flatnonzero(r.context - lost < 1).tolist())
    scores = TaskRequests(eval_set, length, rows * length).measure(losses_of(model))
    expected = plain_scores(eval_set, log_p, cut)
    assert scores.values.keys() == expected.keys()
    for name, each in expected.items():
        np.testing.assert_allclose(scores.values[name], each, rtol=2e-5, atol=1e-6, err_msg=name)
    assert scores.counts["truncated"] == (lost > 0).sum()
    name = str(eval_set.info.primary)
    assert scores.metrics()[name] == pytest.approx(np.nanmean(expected[name]), rel=2e-5)
    return scores.values


@pytest.mark.parametrize("primary", Primary)
def test_made_up_requests_of_all_shapes(
    tmp_path: Path, tiny_tokenizer: Path, primary: Primary
) -> None:
    found = compare(make_task(tmp_path / "set", tiny_tokenizer, primary=primary), LENGTH)
    assert {0.0, 1.0} <= set(found["acc"].tolist()), "some right, some wrong"
    assert not np.array_equal(found["acc"], found["len_norm"], equal_nan=True)


def test_lengths_count_the_space_that_stands_before_a_choice(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    made = make_task(tmp_path / "set", tiny_tokenizer).requests
    text = load_tokenizer(tiny_tokenizer)
    for start, end, context, chars in zip(
        made.starts, made.ends, made.context, made.chars, strict=True
    ):
        said = text.decode(made.tokens[start + context : end].tolist())
        assert said.startswith(" ")
        assert chars == len(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["arc_easy/val_rc_5shot", "winogrande/val_rc_5shot", "boolq/mc_5shot", "gsm8k/gold_bpb_5shot"],
)
def test_real_requests(tmp_path: Path, tiny_tokenizer: Path, name: str) -> None:
    task = read_ai2(real_wheel(), name)
    few = Task(
        task.name, task.primary, task.questions[:4], task.source, task.source_sha256, task.licence
    )
    made = build(few, load_tokenizer(tiny_tokenizer), str(tmp_path / "set"))
    found = compare(made, 1024, rows=1)
    assert not np.isnan(found["BPB"]).any()
