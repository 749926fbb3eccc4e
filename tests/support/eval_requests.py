"""A task of made-up questions, and its requests scored one after the other by a plain loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from olm_data.dataset.eval_set import EvalSet, Primary
from olm_data.extensions.eval_sets.tasks import Continuation, Question, Task, build
from olm_data.tokenizer.tokenizer import load_tokenizer

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "owls", "sleep"]


def words(first: int, count: int) -> str:
    return " ".join(WORDS[(first * 7 + n * n) % len(WORDS)] for n in range(count))


def make_task(
    folder: Path, tokenizer: Path, *, eos: str = "auto", primary: Primary = Primary.len_norm
) -> EvalSet:
    """Questions of 1 to 4 choices, contexts of 0 to 40 words, continuations of 1 to 6."""
    questions = []
    for q in range(23):
        choices = [
            Continuation(words(q, q % 5 * 10), " " + words(q + n + 3, 1 + (q + n) % 6), "Answer:")
            for n in range(1 + q % 4)
        ]
        questions.append(Question(choices, q % len(choices)))
    task = Task("mine", primary, questions, "mine", "", "mine")
    return build(task, load_tokenizer(tokenizer, eos=eos), str(folder))


def one_by_one(model: Any, folder: str | Path, length: int) -> np.ndarray:
    """log p of each continuation: a forward pass for each request, no rows, no mask."""
    found = []
    r = EvalSet.open(str(folder)).requests
    for start, end, context in zip(r.starts, r.ends, r.context, strict=True):
        ids = torch.from_numpy(r.tokens[start:end].astype("int64"))[-(length + 1) :]
        count = min(int(end - start - context), len(ids) - 1)
        with torch.no_grad():
            log_p = torch.log_softmax(model(ids[None, :-1])[0].double(), -1)
        rows = torch.arange(len(ids) - 1)[-count:]
        found.append(log_p[rows, ids[1:][-count:]].sum().item())
    return np.array(found)


def plain_scores(eval_set: EvalSet, log_p: Any, cut: set[int]) -> dict[str, list[float]]:
    """The metrics of each question, choice by choice in Python; of `cut` requests none count."""
    r, values = eval_set.requests, dict[str, list[float]]()
    for question in range(r.questions):
        mine = [i for i in range(len(r.ends)) if r.question[i] == question]
        asked = [i for i in mine if not r.unconditional[i]]
        alone = [i for i in mine if r.unconditional[i]]
        primary = str(eval_set.info.primary)
        gold = next(n for n, i in enumerate(asked) if r.gold[i])
        tokens = [int(r.ends[i] - r.starts[i] - r.context[i]) for i in asked]
        compared = {
            "acc": [log_p[i] for i in asked],
            "len_norm": [log_p[i] / r.chars[i] for i in asked],
            "acc_per_token": [log_p[i] / n for i, n in zip(asked, tokens, strict=True)],
        }
        if r.unconditional.any():
            pairs = zip(asked, alone, strict=True)
            compared["acc_uncond"] = [log_p[i] - log_p[j] for i, j in pairs]
        several = (np.bincount(r.question[~r.unconditional]) > 1).any()
        counts = len(asked) > 1 and not cut & set(mine)
        for name, each in compared.items():
            if not several:
                break
            right = float(each.index(max(each)) == gold)
            values.setdefault(name, []).append(right if counts else math.nan)
        weights = compared.get(primary, compared["acc"])
        soft = math.exp(weights[gold]) / sum(map(math.exp, weights)) if counts else math.nan
        if several:
            values.setdefault("soft", []).append(soft)
            values.setdefault("soft_log", []).append(math.log(soft))
        bits = -log_p[asked[gold]] / math.log(2) / r.bytes[asked[gold]]
        values.setdefault("BPB", []).append(math.nan if cut & set(mine) else bits)
    return values
