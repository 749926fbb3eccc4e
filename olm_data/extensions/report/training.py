"""What a report says of training runs in words and tables: what each was and reached.

    run folders (metrics.jsonl, starts.jsonl, sample.json) -> TrainedRun, ... -> sections

The curves are drawn by the page itself (`run_view.py`, `templates/run.js`).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from olm_data.counts import duration, scaled
from olm_data.errors import InputError
from olm_data.extensions.report.evaluations import EvaluationTable, plus_minus
from olm_data.extensions.watching.watched import WatchedEvaluation, read_all_watched
from olm_data.page import joined, note, part, section, table
from olm_data.path_kinds import nearest
from olm_data.run_log.log import METRICS, Evaluation, RunLog
from olm_data.run_log.metric_names import (
    CE_LOSS,
    DATA_WAIT_SHARE,
    EVAL_BPB,
    EVAL_CE_LOSS,
    MFU,
    TOKENS_PER_SECOND,
)
from olm_data.run_log.run_folder import Sample, StepSamples, picked, read_samples

SHOWN = (CE_LOSS, TOKENS_PER_SECOND, DATA_WAIT_SHARE, MFU)


@dataclass
class TrainedRun:
    """What a training run left behind.

    Attributes:
        name: of the folder.
        log: its starts, steps and evaluations.
        sample: text that its model made, or None.
        samples: texts that it made while it was trained.
        watched: results of `olm-train evaluate --watch`.
    """

    name: str
    log: RunLog
    sample: Sample | None = None
    samples: list[StepSamples] = field(default_factory=list)
    watched: list[WatchedEvaluation] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> TrainedRun:
        """Read the log and `sample.json` of a run folder.

        Raises:
            InputError: the folder has no metrics.
            ValidationError: a line is not what a run writes.
        """
        if not (folder / METRICS).exists():
            raise InputError(
                f"this is not a run folder: it has no {METRICS}",
                where=str(folder),
                fix=nearest(
                    folder,
                    "give the save_folder of a run, or leave --run out for a report on the mixture",
                ),
            )
        log = RunLog.read(folder, metrics=SHOWN)
        return cls(
            name=folder.resolve().name,
            log=log,
            sample=Sample.read(folder),
            samples=read_samples(folder),
            watched=read_all_watched(folder, log.notes),
        )

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return (steps, values) of a metric, where it was recorded."""
        values = ((step.step, step.metrics.get(name)) for step in self.log.steps)
        pairs = [(step, value) for step, value in values if value is not None]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def held_out(self, metric: str = EVAL_CE_LOSS) -> dict[str, tuple[list[int], list[float]]]:
        """Return (steps, values) of a metric of each held-out set; the default: nats a token."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for evaluation in self.evaluations:
            for name, metrics in evaluation.results.items():
                # none: a set without a token, or a loss that overflowed
                loss = metrics.get(metric)
                if loss is not None:
                    steps, losses = found.setdefault(name, ([], []))
                    steps.append(evaluation.step)
                    losses.append(loss)
        return found

    @property
    def standing(self) -> EvaluationTable:
        """The latest evaluation of each held-out set and downstream task."""
        return EvaluationTable(self.evaluations)

    @property
    def evaluations(self) -> list[Evaluation]:
        """Those of the log and those that were made beside the run, by step."""
        both = [*(each.logged for each in self.watched), *self.log.evaluations]
        return sorted(both, key=lambda each: each.step)

    @property
    def _times(self) -> list[float]:
        """When the lines were made, ascending."""
        times = [step.time for step in self.log.steps]
        times += [evaluation.time for evaluation in self.log.evaluations]
        return sorted(time for time in times if time)

    @property
    def seconds(self) -> float:
        """Seconds of work that the log shows: from each start to its last line; 0 if not logged."""
        starts = sorted(start.time for start in self.log.starts if start.time)
        total, before = 0.0, None
        for time in self._times:
            number = bisect.bisect_right(starts, time)
            started = starts[number - 1] if number else time
            total += time - max(started, before if before is not None else started)
            before = time
        return total

    @property
    def ended(self) -> str:
        """Day and time of the last line, UTC; "" if not logged."""
        times = self._times
        if not times:
            return ""
        return datetime.fromtimestamp(times[-1], UTC).strftime("%Y-%m-%d %H:%M UTC")

    @property
    def device(self) -> str:
        """Devices of the last start: how many, and which; "" if not logged."""
        starts = self.log.starts
        if not starts or not starts[-1].device:
            return ""
        return f"{starts[-1].world_size:,} x {starts[-1].device}"

    @property
    def parameters(self) -> str:
        """Parameters of the model; "" if not logged."""
        count = self.log.starts[-1].parameters if self.log.starts else 0
        return scaled(count) if count else ""


def headline(run: TrainedRun) -> list[tuple[str, str]]:
    """Return the facts of a run that stand first: (name, value); empty where not logged."""
    facts, bits = [], run.held_out(EVAL_BPB)
    for name, (_, losses) in run.held_out().items():  # those of one run compare by bytes alone
        known = name in bits
        what, value = ("bits per byte", bits[name][1][-1]) if known else ("loss", losses[-1])
        facts.append((f"{what} on held-out {name}", f"{value:.3f}"))
    facts += [(f"{t.name}: {t.score.metric}", plus_minus(t.score)) for t in run.standing.tasks()]
    _, losses = run.series(CE_LOSS)
    if not facts and losses:
        last = np.mean(losses[-20:])
        facts.append((f"training loss, mean of the last {len(losses[-20:])} steps", f"{last:.3f}"))
    done = run.log.steps[-1] if run.log.steps else None
    return [
        *facts,
        ("tokens trained", scaled(done.tokens if done else 0)),
        ("time", duration(run.seconds) if run.seconds else ""),
        ("parameters", run.parameters),
        ("steps trained", f"{done.step if done else 0:,}"),
        ("device", run.device),
        ("last line", run.ended),
    ]


def perplexity(loss: float) -> str:
    """Return e to the power of a loss in nats."""
    return f"{np.exp(min(loss, 700.0)):,.2f}"


def runs_section(runs: Sequence[TrainedRun]) -> str:
    """Return what each run was and reached side by side, and the commands of their last starts."""
    facts = [dict(headline(run)) for run in runs]
    names = list(dict.fromkeys(name for of_run in facts for name in of_run))
    rows = [(name, *(of_run.get(name, "") for of_run in facts)) for name in names]
    compared = table(("", *(run.name for run in runs)), rows, numbers=len(runs))
    commands = [
        part("command", run.log.starts[-1].command)
        for run in runs
        if run.log.starts and run.log.starts[-1].command
    ]
    title = "Runs" if len(runs) > 1 else "Command"
    parts = [*([compared] if len(runs) > 1 else []), *commands]
    return section(title, joined(parts)) if parts else ""


def held_out_section(runs: Sequence[TrainedRun]) -> str:
    """Return the last loss of each held-out set and of its groups; the curves are the page's."""
    rows = [
        (
            f"{label}{each.name}" + (f", {each.group}" if each.group else ""),
            *(f"{each.step:,}", f"{each.loss:.4f}", perplexity(each.loss)),
            "" if each.bits is None else f"{each.bits:.4f}",
        )
        for label, run in _labelled(runs)
        for each in run.standing.sets()
    ]
    head = ("held-out set", "step", "cross entropy", "perplexity", "bits per byte")
    return section("Held-out losses", table(head, rows, numbers=4)) if rows else ""


def tasks_section(runs: Sequence[TrainedRun]) -> str:
    """Return the last scores of each downstream task, with standard errors over its questions."""
    rows = [
        (
            *(f"{label}{each.name}", f"{each.step:,}", each.score.metric, plus_minus(each.score)),
            "" if each.change is None else plus_minus(each.change, "+"),
            "" if each.bits is None else f"{each.bits:.4f}",
            f"{each.questions:,}",
        )
        for label, run in _labelled(runs)
        for each in run.standing.tasks()
    ]
    head = ("task", "step", "metric", "score", "change", "bits per byte", "questions")
    said = note(
        "± is the standard error over the questions; the change is to the evaluation before, "
        "question by question."
    )
    return section("Downstream tasks", table(head, rows, numbers=4) + said) if rows else ""


def speed_section(runs: Sequence[TrainedRun]) -> str:
    """Return tokens a second, and what of the time was spent on what."""
    facts = []
    for label, run in _labelled(runs):
        _, speed = run.series(TOKENS_PER_SECOND)
        if speed:
            facts.append((f"{label}tokens/s, median", f"{np.median(speed):,.0f}"))
        _, wait = run.series(DATA_WAIT_SHARE)
        if wait:
            facts.append((f"{label}time waiting for data", f"{100 * float(np.mean(wait)):.2f} %"))
        _, mfu = run.series(MFU)
        if mfu:
            facts.append((f"{label}MFU, median", f"{100 * float(np.median(mfu)):.1f} %"))
    return section("Throughput", table(("measure", "value"), facts)) if facts else ""


def _labelled(runs: Sequence[TrainedRun]) -> list[tuple[str, TrainedRun]]:
    """Return each run with what its labels begin with."""
    return [(f"{run.name}: " if len(runs) > 1 else "", run) for run in runs]


def sample_section(run: TrainedRun) -> str:
    """Return the text the trained model made."""
    if run.sample is None:
        return ""
    sample = run.sample
    settings = (
        f"checkpoint {sample.checkpoint}, temperature {sample.temperature}, top_k {sample.top_k}, "
        f"seed {sample.seed}"
    )
    text = part("sample", sample.prompt, sample.text)
    return section(f"Sample of {run.name}", text + note(settings))


def samples_section(run: TrainedRun) -> str:
    """Return the texts that the model made while it was trained, by prompt and step."""
    steps = picked(run.samples)
    if not steps:
        return ""
    last = steps[-1]
    parts = []
    for number, text in enumerate(last.texts):
        parts.append(part("sample", text.prompt or "a new document", ""))
        parts += [
            part("text", f"step {each.step:,}", each.texts[number].text)
            for each in reversed(steps)
            if number < len(each.texts) and each.texts[number].prompt == text.prompt
        ]
    settings = f"temperature {last.temperature}, top_k {last.top_k}, seed {last.seed}"
    return section(f"Samples of {run.name}", joined([*parts, note(settings)]))
