"""Tasks: each request scored as a plain loop does, on any ranks, and logged in a run."""

from __future__ import annotations

import math
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
from support.runs import build_trainer, group_world, metrics

from olm_data.dataset.eval_set import EvalSet, Primary
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.extensions.eval_sets.tasks import Continuation, Question, Task, build
from olm_data.mixture.lock import Lock
from olm_data.storage.store import Store
from olm_data.tokenizer.tokenizer import load_tokenizer
from olm_train.distributed.world import World
from olm_train.evaluation.scoring import TaskScores
from olm_train.extensions.downstream import tasks
from olm_train.extensions.downstream.downstream_evaluator import (
    QuestionScores,
    comparable,
    last_scores,
)
from olm_train.extensions.downstream.evaluation import losses_of
from olm_train.extensions.downstream.tasks import RequestRows, TaskRequests, open_task
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder, build_decoder
from olm_train.model.init import init_parameters
from olm_train.model.loss import IGNORE_INDEX
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


def test_packing_takes_fewer_rows(eval_set: EvalSet) -> None:
    packed, alone = (TaskRequests(eval_set, 96, 192, packed=each).rows for each in (True, False))
    assert packed < alone / 2


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


SIZES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=30)


@settings(max_examples=60)
@given(sizes=SIZES, length=st.integers(6, 20), rows=st.integers(1, 3), packed=st.booleans())
def test_each_request_is_read_once_with_its_continuation_as_labels(
    sizes: list[tuple[int, int]], length: int, rows: int, packed: bool
) -> None:
    context = np.array([a for a, _ in sizes], np.int64)
    ends = np.array([a + b for a, b in sizes], np.int64).cumsum()
    tokens = np.arange(1, ends[-1] + 1)  # each id once
    found = RequestRows(tokens, ends, context, length, rows * length, world=World(), packed=packed)
    seen: dict[int, tuple[list[int], list[int]]] = {}
    for batch, members, offsets in found:
        assert batch.input_ids.shape == (rows, length)
        ids, labels = batch.input_ids.flatten(), batch.labels.flatten()
        for request, begin, end in zip(members, offsets[:-1], offsets[1:], strict=True):
            piece = labels[begin:end]
            if request < 0:
                assert (piece == IGNORE_INDEX).all()
                continue
            assert request not in seen
            seen[int(request)] = ids[begin:end].tolist(), piece[piece >= 0].tolist()
            assert batch.positions.flatten()[begin:end].tolist() == list(range(end - begin))
            assert (batch.doc_start.flatten()[begin:end] == begin % length).all()
    assert sorted(seen) == list(range(len(sizes)))
    for number, (before, after) in enumerate(sizes):
        own = tokens[ends[number] - before - after : ends[number]].tolist()
        kept = own[-(length + 1) :]
        assert seen[number] == (kept[:-1], kept[-min(after, len(kept) - 1) :])
        assert found.lost[number] == len(own) - len(kept)
        assert found.cut[number] == (after > length)
    if not packed:
        assert found.rows == len(sizes)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_have_as_many_batches_and_all_requests_between_them(size: int) -> None:
    ends = np.arange(3, 3 * 20, 3)
    seen, batches = list[int](), set[int]()
    for rank in range(size):
        world = World(rank=rank, size=size, device=torch.device("cpu"))
        found = RequestRows(
            np.arange(ends[-1]), ends, np.ones(len(ends), np.int64), 5, 10, world=world
        )
        batches.add(len([seen.extend(members[members >= 0]) for _, members, _ in found]))
    assert len(batches) == 1
    assert sorted(seen) == list(range(len(ends)))


TASK = "--trainer.callbacks.downstream_evaluator"
OFF = "--trainer.callbacks.lm_evaluator=null"
MINE = "downstream/mine"


def stop(steps: int) -> str:
    return f"--trainer.hard_stop={{value: {steps}, unit: steps}}"


def logged(folder: Path) -> dict[int, dict[str, float]]:
    lines = [line for line in metrics(folder) if MINE in line.get("eval", {})]
    return {line["step"]: line["eval"][MINE] for line in lines}


@pytest.fixture(scope="module")
def task(eval_set: EvalSet) -> Path:
    return Path(eval_set.folder)


def options(task: Path, *more: str) -> list[str]:
    return [OFF, f"{TASK}.tasks={{mine: {task}}}", *[f"{TASK}.{each}" for each in more]]


def test_a_run_logs_what_a_plain_loop_finds_and_how_it_changed(
    task: Path, tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = options(task, "eval_interval=2", "eval_on_startup=true")
    trainer = build_trainer(tiny_mixture, tmp_path, stop(4), *given)
    trainer.train_module.ensure_weights()
    callback: Any = trainer.callbacks["downstream_evaluator"]
    log_p = one_by_one(trainer.train_module.model, task, 32)
    trainer.fit()
    found = logged(tmp_path)
    assert list(found) == [0, 2, 4]
    requests = callback._tasks[MINE].eval_set.requests
    asked = requests.gold & ~requests.unconditional
    bits = -log_p[asked] / math.log(2) / requests.bytes[asked]
    scores = callback._scores[MINE]
    kept = ~np.isnan(scores.values["BPB"])
    assert found[0]["BPB"] == pytest.approx(float(np.mean(bits[kept])), rel=1e-5)
    assert found[0]["truncated"] == callback._tasks[MINE].truncated > 0
    assert "len_norm change" not in found[0]
    for step in (2, 4):
        before = found[step - 2]["len_norm"]
        assert found[step]["len_norm change"] == pytest.approx(found[step]["len_norm"] - before)
        assert found[step]["len_norm change stderr"] >= 0
    last = last_scores(tmp_path, MINE)
    assert last is not None
    assert (last.step, last.metric) == (4, "len_norm")
    assert comparable(last, scores) == pytest.approx(scores.values["len_norm"], nan_ok=True)
    said = capsys.readouterr().err
    assert "requests of downstream/mine are longer than a row of 32 tokens" in said
    assert f"evaluation at step 4   {MINE}   len_norm {found[4]['len_norm']:.4f} +- " in said


def on_ranks(lock: str, folder: str, task: str) -> None:
    given = options(Path(task), "eval_on_startup=true")
    dp = "--train_module.dp_config={name: fsdp, param_dtype: float32}"
    build_trainer(Path(lock), Path(folder), stop(1), *given, dp, world=group_world()).fit()


@pytest.mark.slow
def test_two_sharded_ranks_log_what_one_does(
    task: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    given = options(task, "eval_on_startup=true")
    build_trainer(tiny_mixture, tmp_path / "one", stop(1), *given).fit()
    run_ranks(on_ranks, 2, str(tiny_mixture), str(tmp_path / "two"), str(task))
    alone, two = logged(tmp_path / "one")[0], logged(tmp_path / "two")[0]
    assert two.keys() == alone.keys()
    for name, value in alone.items():
        assert two[name] == pytest.approx(value, rel=1e-5), name


def test_fixed_steps_come_beside_the_interval_and_the_first_may_be_the_last(
    task: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    given = options(task, "eval_interval=3", "fixed_steps=[2]", "eval_on_finish=false")
    build_trainer(tiny_mixture, tmp_path / "all", stop(4), *given).fit()
    assert list(logged(tmp_path / "all")) == [2, 3]
    given = options(task, "eval_interval=2", "cancel_after_first_eval=true")
    trainer = build_trainer(tiny_mixture, tmp_path / "one", stop(4), *given)
    trainer.fit()
    assert trainer.cancelled is not None
    assert (trainer.step, trainer.cancelled.by) == (2, "downstream_evaluator")


def test_an_evaluation_of_other_questions_is_not_compared() -> None:
    scores = TaskScores("a" * 64, "acc", {"acc": np.array([1.0, np.nan])}, {})
    kept = QuestionScores.of(scores, 7)
    assert kept.values == (1.0, None)
    same = comparable(kept, scores)
    assert same is not None
    np.testing.assert_array_equal(same, [1.0, np.nan])
    other = TaskScores("b" * 64, "acc", scores.values, {})
    assert comparable(kept, other) is None


def test_early_stopping_looks_at_held_out_loss_beside_tasks(
    task: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    given = [f"{TASK}.tasks={{mine: {task}}}", f"{TASK}.eval_interval=1"]
    given += ["--trainer.callbacks.lm_evaluator.eval_interval=1"]
    given += ["--trainer.callbacks.early_stopping={patience: 9}"]
    trainer = build_trainer(tiny_mixture, tmp_path, stop(2), *given)
    trainer.fit()
    assert trainer.cancelled is None
    assert list(logged(tmp_path)) == [1, 2]


def scores(step: int, *values: float | None) -> QuestionScores:
    return QuestionScores(digest="d" * 64, metric="acc", step=step, values=values)


def test_the_latest_before_a_step_is_found(tmp_path: Path) -> None:
    assert last_scores(tmp_path, "downstream/mine") is None
    written = {step: scores(step, 1.0, None, step / 7) for step in (5, 100, 20)}
    for each in written.values():
        each.write(tmp_path, "downstream/mine")
    assert last_scores(tmp_path, "downstream/mine") == written[100]
    assert last_scores(tmp_path, "downstream/mine", before=100) == written[20]
    assert last_scores(tmp_path, "downstream/mine", before=5) is None
    scores(20, 0.5).write(tmp_path, "downstream/mine")
    assert last_scores(tmp_path, "downstream/mine", before=100) == scores(20, 0.5)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    scores(5, 1.0).write(tmp_path, "mine")
    path = tmp_path / "evaluations" / "mine" / "step00000005.json"
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ValidationError, match="the scores are damaged"):
        last_scores(tmp_path, "mine")


def test_d3_scores_of_any_number_of_questions_that_are_written_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = scores(5, *[1 / 3] * 900_000)
    many.write(tmp_path, "mine")
    assert (tmp_path / "evaluations" / "mine" / "step00000005.json").stat().st_size > 16 << 20
    assert last_scores(tmp_path, "mine") == many
    monkeypatch.setattr(Store.put, "__kwdefaults__", {"limit": 1 << 20})
    with pytest.raises(InputError, match="nothing could read it again"):
        scores(6, *many.values).write(tmp_path, "mine")
    assert last_scores(tmp_path, "mine") == many
