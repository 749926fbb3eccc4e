"""What a report shows of training runs: what each was and reached, and their curves overlaid.

    run folders (metrics.jsonl, starts.jsonl, sample.json) -> TrainedRun, ... -> sections

Reads JSON only; never torch.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from olm_data.bounded_json import MalformedJson, decode_object
from olm_data.counts import duration, scaled
from olm_data.errors import InputError
from olm_data.page import COLOURS, joined, note, part, section, svg, table, whole_numbers
from olm_data.regular_files import MAX_CONFIG, read_regular
from olm_data.run_log.log import METRICS, RunLog, malformed_log
from olm_data.run_log.metric_names import (
    CE_LOSS,
    DATA_WAIT_SHARE,
    EVAL_CE_LOSS,
    GRAD_NORM,
    LR,
    MFU,
    TOKENS_PER_SECOND,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = ("-", "--", ":", "-.")
"""One for each run; the colours are those of the held-out sets."""
SHOWN = (CE_LOSS, LR, GRAD_NORM, TOKENS_PER_SECOND, DATA_WAIT_SHARE, MFU)


@dataclass
class TrainedRun:
    """What a training run left behind.

    Attributes:
        name: of the folder.
        log: its starts, steps and evaluations.
        sample: the generated sample, or None.
    """

    name: str
    log: RunLog
    sample: dict[str, Any] | None = None

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
                fix="give the save_folder of a run, or leave --run out for a report on the mixture",
            )
        run = cls(name=folder.resolve().name, log=RunLog.read(folder, metrics=SHOWN))
        sample = folder / "sample.json"
        if sample.exists():
            try:
                run.sample = decode_object(read_regular(sample, MAX_CONFIG))
            except MalformedJson as error:
                raise malformed_log(sample, str(error)) from None
        return run

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return (steps, values) of a metric, where it was recorded."""
        values = ((step.step, step.metrics.get(name)) for step in self.log.steps)
        pairs = [(step, value) for step, value in values if value is not None]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def held_out(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return (steps, cross entropies in nats a token) of each held-out set."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for evaluation in self.log.evaluations:
            for name, metrics in evaluation.results.items():
                # none: a set without a token, or a loss that overflowed
                loss = metrics.get(EVAL_CE_LOSS)
                if loss is not None:
                    steps, losses = found.setdefault(name, ([], []))
                    steps.append(evaluation.step)
                    losses.append(loss)
        return found

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
    facts = []
    for name, (_, losses) in run.held_out().items():
        facts.append((f"loss on held-out {name}", f"{losses[-1]:.3f}"))
        facts.append((f"perplexity on {name}", perplexity(losses[-1])))
    _, losses = run.series(CE_LOSS)
    if not facts and losses:
        last = np.mean(losses[-20:])
        facts.append((f"training loss, mean of the last {len(losses[-20:])} steps", f"{last:.3f}"))
    done = run.log.steps[-1] if run.log.steps else None
    return [
        *facts,
        ("parameters", run.parameters),
        ("steps trained", f"{done.step if done else 0:,}"),
        ("tokens trained", scaled(done.tokens if done else 0)),
        ("time", duration(run.seconds) if run.seconds else ""),
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


def _lines(runs: Sequence[TrainedRun]) -> Iterator[tuple[str, str, TrainedRun]]:
    """Yield line style and prefix of the label of each run."""
    for style, run in zip(cycle(LINES), runs, strict=False):
        yield style, f"{run.name}: " if len(runs) > 1 else "", run


def training_section(runs: Sequence[TrainedRun]) -> str:
    """Return loss, validation, learning rate and gradient norm over the steps."""
    if not any(run.series(CE_LOSS)[0] for run in runs):
        return ""
    sets = list(dict.fromkeys(name for run in runs for name in run.held_out()))
    colour_of = dict(zip(sets, cycle(COLOURS), strict=False))

    def draw(axes: Axes) -> None:
        for style, label, run in _lines(runs):
            axes.plot(
                *run.series(CE_LOSS), style, color="#9aa3af", linewidth=1, label=f"{label}train"
            )
            for name, (steps, losses) in run.held_out().items():
                axes.plot(
                    *(steps, losses, style),
                    color=colour_of[name],
                    marker="o",
                    markersize=3.5,
                    label=f"{label}held-out {name}",
                )
        axes.set_xlabel("step")
        axes.set_ylabel("cross entropy, nats a token")
        whole_numbers(axes.xaxis)
        axes.legend(frameon=False)

    said = []
    for _, label, run in _lines(runs):
        _, losses = run.series(CE_LOSS)
        told = [f"train from {losses[0]:.2f} to {losses[-1]:.2f}"] if losses else []
        told += [f"{name} ends at {ys[-1]:.3f}" for name, (_, ys) in run.held_out().items()]
        said.append(label + ", ".join(told))
    small = [
        _small(runs, LR, "learning rate", COLOURS[1]),
        _small(runs, GRAD_NORM, "gradient norm", COLOURS[3], log_scale=True),
    ]
    rows = [
        (f"{label}{name}", f"{steps[-1]:,}", f"{losses[-1]:.4f}", perplexity(losses[-1]))
        for _, label, run in _lines(runs)
        for name, (steps, losses) in run.held_out().items()
    ]
    head = ("held-out set", "step", "cross entropy", "perplexity")
    picture = svg(draw, f"Loss over the steps: {'; '.join(said)}")
    losses_of = [table(head, rows, numbers=3)] if rows else []
    return section("Training", joined([picture, part("pair", joined(small)), *losses_of]))


def _small(
    runs: Sequence[TrainedRun], metric: str, name: str, colour: str, *, log_scale: bool = False
) -> str:
    """Return a small picture of one metric over the steps; "" where no run has it."""
    if not any(run.series(metric)[0] for run in runs):
        return ""

    def draw(axes: Axes) -> None:
        for style, label, run in _lines(runs):
            axes.plot(*run.series(metric), style, color=colour, linewidth=1, label=label[:-2])
        axes.set_xlabel("step")
        axes.set_ylabel(name)
        whole_numbers(axes.xaxis)
        if log_scale:
            axes.set_yscale("log")
        if len(runs) > 1:
            axes.legend(frameon=False, fontsize=7)

    return svg(draw, f"{name} over the steps", width=4.4, height=2.2)


def speed_section(runs: Sequence[TrainedRun]) -> str:
    """Return tokens a second over the steps."""
    if not any(run.series(TOKENS_PER_SECOND)[0] for run in runs):
        return ""

    def draw(axes: Axes) -> None:
        for style, label, run in _lines(runs):
            axes.plot(
                *run.series(TOKENS_PER_SECOND),
                style,
                color=COLOURS[2],
                linewidth=1,
                label=label[:-2],
            )
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel("tokens/s")
        whole_numbers(axes.xaxis)
        whole_numbers(axes.yaxis)
        if len(runs) > 1:
            axes.legend(frameon=False)

    facts = []
    for _, label, run in _lines(runs):
        _, speed = run.series(TOKENS_PER_SECOND)
        if speed:
            facts.append((f"{label}tokens/s, median", f"{np.median(speed):,.0f}"))
        _, wait = run.series(DATA_WAIT_SHARE)
        if wait:
            facts.append((f"{label}time waiting for data", f"{100 * float(np.mean(wait)):.2f} %"))
        _, mfu = run.series(MFU)
        if mfu:
            facts.append((f"{label}MFU, median", f"{100 * float(np.median(mfu)):.1f} %"))
    alt = "Throughput over the steps: " + "; ".join(" ".join(fact) for fact in facts)
    return section("Throughput", svg(draw, alt, height=2.4) + table(("measure", "value"), facts))


def sample_section(run: TrainedRun) -> str:
    """Return the text the trained model made."""
    if run.sample is None:
        return ""
    made = part("sample", *(str(run.sample.get(name, "")) for name in ("prompt", "text")))
    settings = {k: v for k, v in run.sample.items() if k not in ("prompt", "text", "ids")}
    said = note(", ".join(f"{key} {value}" for key, value in settings.items()))
    return section(f"Sample of {run.name}", made + said)
