"""Our rules beside the metric that OLMES tasks are known by, on the same made-up logits.

Its numbers were taken once (`support.reference_scores`) and lie beside this file. Where ours differ
on purpose, a test below says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.reference_scores import GOLDEN, SEEDS, Case, case, log_p, missing, near

from olm_data.dataset.eval_set import COLUMNS, About, EvalSet, EvalSetInfo, Primary, requests_of
from olm_data.dataset.tokenizer import TokenizerRules
from olm_data.errors import ValidationError
from olm_data.storage.store import Store
from olm_train.evaluation.scoring import TaskScores, score

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
