"""From log-probabilities of requests to the metrics of a task, by the rules of OLMES.

    acc             largest log-probability, summed over the continuation
    len_norm        the same over its characters          (acc_per_char; OLMES for cloze questions)
    acc_per_token   the same over its tokens
    acc_uncond      log p(continuation | context) - log p(continuation | unconditional context)
    soft, soft_log  soft-max over the choices, of what the primary metric compares: p and log p
    BPB             -log p / ln 2 / bytes of the right continuation, mean over questions

Of several best choices the first counts, and the question is counted as a tie. Gu et al., "OLMES: A
standard for language model evaluations" (2024). Pure: arrays in, numbers out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from olm_data.dataset.eval_set import EvalSet, Requests
from olm_data.run_log.metric_names import (
    EVAL_ACC,
    EVAL_BPB,
    EVAL_LEFT_OUT,
    EVAL_LEN_NORM,
    EVAL_PER_TOKEN,
    EVAL_QUESTIONS,
    EVAL_SOFT,
    EVAL_SOFT_LOG,
    EVAL_TIES,
    EVAL_TRUNCATED,
    EVAL_UNCOND,
    change_of,
    primary_of,
    stderr_of,
)

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class TaskScores:
    """What a model scores on a task.

    Attributes:
        digest: of the eval set.
        primary: the metric that it is judged by.
        values: float64 [questions] of each metric by name; NaN where a question does not count.
        counts: questions, left out, truncated, ties.
    """

    digest: str
    primary: str
    values: dict[str, Float64]
    counts: dict[str, int]

    def metrics(self) -> dict[str, float]:
        """Return means, the standard error of the primary one, and the counts."""
        found = {name: mean_and_error(each)[0] for name, each in self.values.items()}
        error = mean_and_error(self.values[self.primary])[1]
        return {**found, stderr_of(self.primary): error, **self.counts}


def score(eval_set: EvalSet, log_p: Float64, cut: NDArray[np.bool_], truncated: int) -> TaskScores:
    """Return the scores of a task.

    Args:
        log_p: float64 [requests], nats, summed over each continuation.
        cut: bool [requests], whose continuation was not scored as a whole.
        truncated: requests with a context that lost its beginning.
    """
    requests, primary = eval_set.requests, str(eval_set.info.primary)
    asked = np.flatnonzero(~requests.unconditional)
    question = requests.question[asked]
    first = np.flatnonzero(np.diff(question, prepend=-1))  # the requests of question q
    gold = np.flatnonzero(requests.gold[asked])
    several = np.diff(first, append=len(asked)) > 1
    tokens = np.diff(requests.ends, prepend=0) - requests.context
    compared = {EVAL_ACC: log_p[asked]}
    compared[EVAL_LEN_NORM] = log_p[asked] / requests.chars[asked]
    compared[EVAL_PER_TOKEN] = log_p[asked] / tokens[asked]
    alone = _unconditional(requests, log_p, asked)
    if alone is not None:
        compared[EVAL_UNCOND] = log_p[asked] - alone
    bad = np.logical_or.reduceat(cut[asked], first)
    if alone is not None:
        bad |= np.bincount(requests.question[cut & requests.unconditional], minlength=len(bad)) > 0
    for each in compared.values():  # no number is no wrong answer
        bad |= np.logical_or.reduceat(np.isnan(each), first)
    values, ties = dict[str, Float64](), 0
    if several.any():
        for name, each in compared.items():
            best = np.maximum.reduceat(each, first)
            is_best = each == best[question]
            places = np.where(is_best, np.arange(len(each)), len(each))
            right = np.minimum.reduceat(places, first) == gold
            values[name] = np.where(several, right, np.nan).astype(np.float64)
            if name == primary:
                ties = int((np.add.reduceat(is_best.astype(int), first)[several & ~bad] > 1).sum())
        weighed = compared.get(primary, compared[EVAL_ACC])
        shift = weighed - np.maximum.reduceat(weighed, first)[question]
        log_soft = shift[gold] - np.log(np.add.reduceat(np.exp(shift), first))
        values[EVAL_SOFT] = np.where(several, np.exp(log_soft), np.nan)
        values[EVAL_SOFT_LOG] = np.where(several, log_soft, np.nan)
    values[EVAL_BPB] = -log_p[asked][gold] / math.log(2) / requests.bytes[asked][gold]
    values = {name: np.where(bad, np.nan, each) for name, each in values.items()}
    counts = {
        EVAL_QUESTIONS: int((~np.isnan(values[primary])).sum()),
        EVAL_LEFT_OUT: int(bad.sum()),
        EVAL_TRUNCATED: truncated,
        EVAL_TIES: ties,
    }
    return TaskScores(eval_set.info.digest, primary, values, counts)


def _unconditional(requests: Requests, log_p: Float64, asked: NDArray[np.int64]) -> Float64 | None:
    """Return the log-probability after the unconditional context for each request that asks."""
    alone = np.flatnonzero(requests.unconditional)
    width = int(requests.choice.max()) + 1

    def key(which: NDArray[np.int64]) -> NDArray[np.int64]:
        return requests.question[which] * width + requests.choice[which]

    if len(alone) != len(asked):
        return None
    order, wanted = alone[np.argsort(key(alone))], np.argsort(np.argsort(key(asked)))
    assert (np.sort(key(alone)) == np.sort(key(asked))).all()
    return log_p[order][wanted]


def mean_and_error(values: Float64) -> tuple[float, float]:
    """Return the mean over the questions that count, and its standard error; NaN where unknown."""
    kept = values[~np.isnan(values)]
    if not len(kept):
        return math.nan, math.nan
    error = float(np.std(kept, ddof=1) / math.sqrt(len(kept))) if len(kept) > 1 else math.nan
    return float(np.mean(kept)), error


@dataclass(frozen=True)
class Change:
    """Mean difference of a metric between two evaluations of the same questions, and its error."""

    mean: float
    error: float
    questions: int

    @property
    def p(self) -> float:
        """Probability of a difference as large by chance, two-sided, normal.

        NaN where it cannot be told: all questions have changed by the same.
        """
        if not self.error:
            return 1.0 if self.mean == 0 else math.nan
        return math.erfc(abs(self.mean) / self.error / math.sqrt(2))

    def metrics(self, metric: str) -> dict[str, float]:
        """Return it as metrics of an evaluation."""
        name = change_of(metric)
        return {name: self.mean, stderr_of(name): self.error}


def change(now: Float64, before: Float64) -> Change:
    """Return the paired difference of two evaluations, float64 [questions] each."""
    mean, error = mean_and_error(now - before)
    return Change(mean, error, int((~np.isnan(now - before)).sum()))


def line_of_task(results: Mapping[str, float]) -> str:
    """Return the metrics of a task in a line: the primary one first, with its standard error.

    `len_norm 0.412 +- 0.020, change +0.013 +- 0.010 (p 0.19)   BPB 0.931   (570 questions)`
    """
    primary = primary_of(results)
    assert primary is not None
    parts = f"{primary} {results[primary]:.4f} +- {results[stderr_of(primary)]:.4f}"
    name = change_of(primary)
    if name in results:
        found = Change(results[name], results[stderr_of(name)], 0)
        parts += f", change {found.mean:+.4f} +- {found.error:.4f} (p {found.p:.2g})"
    if primary != EVAL_BPB:
        parts += f"   {EVAL_BPB} {results[EVAL_BPB]:.4f}"
    said = [f"{int(results[EVAL_QUESTIONS]):,} questions"]
    for name in (EVAL_LEFT_OUT, EVAL_TIES):
        if results[name]:
            said.append(f"{int(results[name]):,} {name}")
    if results[EVAL_TRUNCATED]:
        said.append(f"{int(results[EVAL_TRUNCATED]):,} requests {EVAL_TRUNCATED}")
    return f"{parts}   ({', '.join(said)})"
