"""Requests of tasks: each scored as a plain loop scores it, whatever shares its row or rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.distributed import run_ranks
from support.eval_requests import make_task, one_by_one, plain_scores
from support.runs import group_world

from olm_data.dataset.eval_set import EvalSet, Primary
from olm_data.errors import UsageError, ValidationError
from olm_data.extensions.eval_sets.tasks import Continuation, Question, Task, build
from olm_data.mixture.lock import Lock
from olm_data.tokenizer.tokenizer import load_tokenizer
from olm_train.distributed.world import World
from olm_train.evaluation.scoring import TaskScores
from olm_train.extensions.downstream import tasks
from olm_train.extensions.downstream.evaluation import losses_of
from olm_train.extensions.downstream.tasks import TaskRequests, open_task
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder, build_decoder
from olm_train.model.init import init_parameters
from olm_train.model.loss_chunked import by_label_chunked


@pytest.fixture(scope="module")
def eval_set(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> EvalSet:
    return make_task(tmp_path_factory.mktemp("task") / "set", tiny_tokenizer)


def tiny_model(vocab_size: int) -> Decoder:
    config = DecoderConfig(vocab_size=vocab_size, d_model=32, n_layers=2, n_heads=2)
    model = build_decoder(config, dtype=torch.float32)
    init_parameters(model, 3)
    return model


@settings(max_examples=5)
@given(length=st.integers(3, 120), rows=st.integers(1, 5), packed=st.booleans())
def test_scores_are_those_of_a_plain_loop(
    eval_set: EvalSet, length: int, rows: int, packed: bool
) -> None:
    model = tiny_model(eval_set.info.tokenizer.vocab_size)
    task = TaskRequests(eval_set, length, rows * length, packed=packed)
    scores = task.measure(losses_of(model))
    assert scores is not None
    log_p, r = one_by_one(model, eval_set.folder, length), eval_set.requests
    inputs = r.ends - r.starts - 1
    cut = set(np.flatnonzero(r.context - np.maximum(inputs - length, 0) < 1).tolist())
    expected = plain_scores(eval_set, log_p, cut)
    assert scores.values.keys() == expected.keys()
    for name, each in expected.items():
        np.testing.assert_allclose(scores.values[name], each, rtol=1e-5, atol=1e-6, err_msg=name)
    assert scores.counts["truncated"] == (inputs > length).sum()
    left_out = {int(r.question[i]) for i in cut}
    assert scores.counts["left out"] == len(left_out)


def test_packing_takes_fewer_rows_and_changes_no_score(eval_set: EvalSet) -> None:
    model = tiny_model(eval_set.info.tokenizer.vocab_size)
    found = []
    for packed in (True, False):
        task = TaskRequests(eval_set, 96, 192, packed=packed)
        found.append((task.rows, task.measure(losses_of(model))))
    assert found[0][0] < found[1][0] / 2
    first, second = (scores for _, scores in found)
    assert first is not None
    assert second is not None
    np.testing.assert_allclose(first.values["BPB"], second.values["BPB"], rtol=1e-5)
    assert first.metrics()["len_norm"] == second.metrics()["len_norm"]


def log_p_of(folder: str, packed: bool) -> np.ndarray:
    """What a rank has of each request in the end."""
    eval_set, kept = EvalSet.open(folder), list[np.ndarray]()
    score = tasks.score

    def keep(eval_set: EvalSet, log_p: np.ndarray, *rest: Any) -> TaskScores:
        kept.append(log_p)
        return score(eval_set, log_p, *rest)

    tasks.score = keep
    try:
        world = group_world() if dist.is_initialized() else World()
        model = tiny_model(eval_set.info.tokenizer.vocab_size)
        TaskRequests(eval_set, 96, 288, world=world, packed=packed).measure(losses_of(model))
    finally:
        tasks.score = score
    return kept[0]


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
def test_each_request_has_one_log_likelihood_on_1_2_and_4_ranks(
    eval_set: EvalSet, packed: bool
) -> None:
    model = tiny_model(eval_set.info.tokenizer.vocab_size)
    plain = one_by_one(model, eval_set.folder, 96)
    assert len(plain) % 6  # rows of a batch of two ranks
    assert len(plain) % 12
    np.testing.assert_allclose(log_p_of(eval_set.folder, packed), plain, atol=1e-5, rtol=0)
    for ranks in (2, 4):
        for log_p in run_ranks(log_p_of, ranks, eval_set.folder, packed):
            np.testing.assert_allclose(log_p, plain, atol=1e-5, rtol=0)


def test_ties_go_to_the_first_choice_and_are_counted(tmp_path: Path, tiny_tokenizer: Path) -> None:
    same = [Continuation("The quick", " fox"), Continuation("The quick", " fox")]
    task = Task("ties", Primary.acc, [Question(same, 0), Question(same, 1)], "mine", "", "mine")
    made = build(task, load_tokenizer(tiny_tokenizer), str(tmp_path / "set"))
    model = tiny_model(made.info.tokenizer.vocab_size)
    scores = TaskRequests(made, 32, 32).measure(losses_of(model))
    assert scores is not None
    assert scores.values["acc"].tolist() == [1.0, 0.0]
    assert scores.counts["ties"] == 2


def test_logits_in_fp32_do_not_tie_where_bf16_ones_do() -> None:
    torch.manual_seed(1)
    from olm_train.model.head import Head

    head = Head((torch.randn(64, 16)).bfloat16(), 64)
    x, labels = torch.randn(1, 200, 16).bfloat16(), torch.randint(0, 64, (1, 200))
    coarse = by_label_chunked(head, x, labels, None)
    fine = by_label_chunked(head, x, labels, 32, fp32_logits=True)
    wide = Head(head.weight.float(), 64)
    torch.testing.assert_close(fine, by_label_chunked(wide, x.float(), labels, None))
    assert fine.dtype == torch.float32
    assert (fine - coarse).abs().max() > 1e-4


def test_a_set_of_another_tokenizer_and_a_module_without_losses_are_refused(
    eval_set: EvalSet, tiny_mixture: Path, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    lock = Lock.read(tiny_mixture)
    assert open_task("mine", eval_set.folder, lock).info == eval_set.info
    other = tmp_path / "tokenizer.json"
    other.write_text(tiny_tokenizer.read_text().replace("<|endoftext|>", "<|end|>"))
    theirs = make_task(tmp_path / "set", other, eos="<|end|>")
    with pytest.raises(ValidationError, match="made by another tokenizer"):
        open_task("mine", theirs.folder, lock)
    with pytest.raises(UsageError, match="gives no losses of labels"):
        TaskRequests(eval_set, 32, 32).measure(lambda batch: None)


def test_it_leaves_off_where_it_is_told_to(eval_set: EvalSet) -> None:
    assert TaskRequests(eval_set, 32, 32).measure(lambda b: None, stop=lambda: True) is None
