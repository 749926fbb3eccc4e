"""What a report shows of training runs: what each was and reached, and their curves overlaid.

    run folders (metrics.jsonl, starts.jsonl, sample.json) -> RunLog, ... -> sections

Reads JSON only; never torch.
"""

from __future__ import annotations

import bisect
import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from olm_data.audit.run_log import STARTS, Start, read_starts
from olm_data.bounded_json import MalformedJson, decode_object
from olm_data.counts import MAX_COUNT, duration, scaled
from olm_data.errors import InputError, shown
from olm_data.json_lines import LogEnd, json_lines, malformed_log
from olm_data.page import COLOURS, note, section, svg, table, whole_numbers
from olm_data.regular_files import MAX_CONFIG, read_regular
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

_LATEST = 1e11  # seconds since 1970
LINES = ("-", "--", ":", "-.")
"""One for each run; the colours are those of the held-out sets."""


@dataclass
class RunLog:
    """What a training run left behind.

    Attributes:
        name: of the folder.
        steps: one mapping a step, in order: `step`, `tokens` and the metrics by name.
        evals: one mapping an evaluation: `step`, `eval` -> dataset -> metrics.
        starts: of the run, oldest first; empty in logs without.
        sample: the generated sample, or None.
        notes: what of the files was left out.
    """

    name: str
    steps: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    sample: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> RunLog:
        """Read `metrics.jsonl`, `starts.jsonl` and `sample.json` of a run folder.

        Raises:
            InputError: the folder has no metrics.
            ValidationError: a line is not what a run writes.
        """
        path = folder / "metrics.jsonl"
        if not path.exists():
            raise InputError(
                "this is not a run folder: it has no metrics.jsonl",
                where=str(folder),
                fix="give the save_folder of a run, or leave --run out for a report on the mixture",
            )
        end, cut = LogEnd(), LogEnd()
        log = cls(name=folder.resolve().name, starts=read_starts(folder, cut))
        for number, entry in json_lines(path, end):
            if fault := _fault(entry):
                raise malformed_log(path, f"line {number}: {fault}")
            (log.evals if "eval" in entry else log.steps).append(entry)
        log.notes = [*end.note(path), *cut.note(folder / STARTS)]
        sample = folder / "sample.json"
        if sample.exists():
            try:
                log.sample = decode_object(read_regular(sample, MAX_CONFIG))
            except MalformedJson as error:
                raise malformed_log(sample, str(error)) from None
        return log

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return (steps, values) of a metric, where it was recorded."""
        values = ((entry["step"], entry.get(name)) for entry in self.steps)
        pairs = [(s, float(value)) for s, value in values if isinstance(value, int | float)]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def held_out(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return (steps, cross entropies in nats a token) of each held-out set."""
        found: dict[str, tuple[list[int], list[float]]] = {}
        for entry in self.evals:
            for name, metrics in entry["eval"].items():
                # none: a set without a token, or a loss that overflowed
                if metrics.get(EVAL_CE_LOSS) is not None:
                    steps, losses = found.setdefault(name, ([], []))
                    steps.append(entry["step"])
                    losses.append(metrics[EVAL_CE_LOSS])
        return found

    @property
    def seconds(self) -> float:
        """Seconds of work that the log shows: from each start to its last line; 0 if not logged."""
        starts = sorted(start.time for start in self.starts if start.time)
        total, before = 0.0, None
        for time in sorted(e["time"] for e in (*self.steps, *self.evals) if "time" in e):
            number = bisect.bisect_right(starts, time)
            started = starts[number - 1] if number else time
            total += time - max(started, before if before is not None else started)
            before = time
        return total

    @property
    def ended(self) -> str:
        """Day and time of the last line, UTC; "" if not logged."""
        times = [entry["time"] for entry in (*self.steps, *self.evals) if "time" in entry]
        if not times:
            return ""
        return datetime.fromtimestamp(max(times), UTC).strftime("%Y-%m-%d %H:%M UTC")

    @property
    def device(self) -> str:
        """Devices of the last start: how many, and which; "" if not logged."""
        if not self.starts or not self.starts[-1].device:
            return ""
        return f"{self.starts[-1].world_size:,} x {self.starts[-1].device}"

    @property
    def parameters(self) -> str:
        """Parameters of the model; "" if not logged."""
        count = self.starts[-1].parameters if self.starts else 0
        return scaled(count) if count else ""


def _fault(entry: dict[str, Any]) -> str | None:
    """Return why a line of the log cannot be shown, None where it can."""
    step, time = entry.get("step"), entry.get("time", 0.0)
    tokens = entry.get("tokens", 0 if "eval" in entry else None)
    if not all(type(n) is int and 0 <= n <= MAX_COUNT for n in (step, tokens)):
        return "step and tokens are not what a run writes"
    if not isinstance(time, int | float) or not 0 <= time < _LATEST:
        return "its time is not a time"
    sets = entry.get("eval", {})
    if not isinstance(sets, dict) or not all(
        isinstance(metrics, dict) and isinstance(metrics.get(EVAL_CE_LOSS), int | float | None)
        for metrics in sets.values()
    ):
        return "an evaluation without a loss"
    return None


def headline(log: RunLog) -> list[tuple[str, str]]:
    """Return the facts of a run that stand first: (name, value); empty where not logged."""
    facts = []
    for name, (_, losses) in log.held_out().items():
        facts.append((f"loss on held-out {name}", f"{losses[-1]:.3f}"))
        facts.append((f"perplexity on {name}", perplexity(losses[-1])))
    _, losses = log.series(CE_LOSS)
    if not facts and losses:
        last = np.mean([loss for loss in losses[-20:] if loss is not None] or [np.nan])
        facts.append((f"training loss, mean of the last {len(losses[-20:])} steps", f"{last:.3f}"))
    done = log.steps[-1] if log.steps else {"step": 0, "tokens": 0}
    return [
        *facts,
        ("parameters", log.parameters),
        ("steps trained", f"{done['step']:,}"),
        ("tokens trained", scaled(done["tokens"])),
        ("time", duration(log.seconds) if log.seconds else ""),
        ("device", log.device),
        ("last line", log.ended),
    ]


def perplexity(loss: float) -> str:
    """Return e to the power of a loss in nats."""
    return f"{np.exp(min(loss, 700.0)):,.2f}"


def runs_section(logs: Sequence[RunLog]) -> str:
    """Return what each run was and reached side by side, and the commands of their last starts."""
    facts = [dict(headline(log)) for log in logs]
    names = list(dict.fromkeys(name for of_run in facts for name in of_run))
    rows = [(name, *(of_run.get(name, "") for of_run in facts)) for name in names]
    compared = table(("", *(log.name for log in logs)), rows, numbers=len(logs))
    commands = "".join(
        f"<pre>{html.escape(shown(log.starts[-1].command))}</pre>"
        for log in logs
        if log.starts and log.starts[-1].command
    )
    title = "Runs" if len(logs) > 1 else "Command"
    body = (compared if len(logs) > 1 else "") + commands
    return section(title, body) if body else ""


def _lines(logs: Sequence[RunLog]) -> Iterator[tuple[str, str, RunLog]]:
    """Yield line style and prefix of the label of each run."""
    for style, log in zip(cycle(LINES), logs, strict=False):
        yield style, f"{log.name}: " if len(logs) > 1 else "", log


def training_section(logs: Sequence[RunLog]) -> str:
    """Return loss, validation, learning rate and gradient norm over the steps."""
    if not any(log.series(CE_LOSS)[0] for log in logs):
        return ""
    sets = list(dict.fromkeys(name for log in logs for name in log.held_out()))
    colour_of = dict(zip(sets, cycle(COLOURS), strict=False))

    def draw(axes: Axes) -> None:
        for style, label, log in _lines(logs):
            axes.plot(
                *log.series(CE_LOSS), style, color="#9aa3af", linewidth=1, label=f"{label}train"
            )
            for name, (steps, losses) in log.held_out().items():
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
    for _, label, log in _lines(logs):
        _, losses = log.series(CE_LOSS)
        told = [f"train from {losses[0]:.2f} to {losses[-1]:.2f}"] if losses else []
        told += [f"{name} ends at {ys[-1]:.3f}" for name, (_, ys) in log.held_out().items()]
        said.append(label + ", ".join(told))
    small = _small(logs, LR, "learning rate", COLOURS[1])
    small += _small(logs, GRAD_NORM, "gradient norm", COLOURS[3], log_scale=True)
    rows = [
        (f"{label}{name}", f"{steps[-1]:,}", f"{losses[-1]:.4f}", perplexity(losses[-1]))
        for _, label, log in _lines(logs)
        for name, (steps, losses) in log.held_out().items()
    ]
    head = ("held-out set", "step", "cross entropy", "perplexity")
    picture = svg(draw, f"Loss over the steps: {'; '.join(said)}")
    body = picture + f'<div class="pair">{small}</div>'
    return section("Training", body + (table(head, rows, numbers=3) if rows else ""))


def _small(
    logs: Sequence[RunLog], metric: str, name: str, colour: str, *, log_scale: bool = False
) -> str:
    """Return a small picture of one metric over the steps; "" where no run has it."""
    if not any(log.series(metric)[0] for log in logs):
        return ""

    def draw(axes: Axes) -> None:
        for style, label, log in _lines(logs):
            axes.plot(*log.series(metric), style, color=colour, linewidth=1, label=label[:-2])
        axes.set_xlabel("step")
        axes.set_ylabel(name)
        whole_numbers(axes.xaxis)
        if log_scale:
            axes.set_yscale("log")
        if len(logs) > 1:
            axes.legend(frameon=False, fontsize=7)

    return svg(draw, f"{name} over the steps", width=4.4, height=2.2)


def speed_section(logs: Sequence[RunLog]) -> str:
    """Return tokens a second over the steps."""
    if not any(log.series(TOKENS_PER_SECOND)[0] for log in logs):
        return ""

    def draw(axes: Axes) -> None:
        for style, label, log in _lines(logs):
            axes.plot(
                *log.series(TOKENS_PER_SECOND),
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
        if len(logs) > 1:
            axes.legend(frameon=False)

    facts = []
    for _, label, log in _lines(logs):
        _, speed = log.series(TOKENS_PER_SECOND)
        if speed:
            facts.append((f"{label}tokens/s, median", f"{np.median(speed):,.0f}"))
        _, wait = log.series(DATA_WAIT_SHARE)
        if wait:
            facts.append((f"{label}time waiting for data", f"{100 * float(np.mean(wait)):.2f} %"))
        _, mfu = log.series(MFU)
        if mfu:
            facts.append((f"{label}MFU, median", f"{100 * float(np.median(mfu)):.1f} %"))
    alt = "Throughput over the steps: " + "; ".join(" ".join(fact) for fact in facts)
    return section("Throughput", svg(draw, alt, height=2.4) + table(("measure", "value"), facts))


def sample_section(log: RunLog) -> str:
    """Return the text the trained model made."""
    if log.sample is None:
        return ""
    prompt, text = (
        html.escape(shown(str(log.sample.get(part, "")))) for part in ("prompt", "text")
    )
    made = f'<pre><b class="prompt">{prompt}</b>{text}</pre>'
    settings = {k: v for k, v in log.sample.items() if k not in ("prompt", "text", "ids")}
    said = note(", ".join(f"{key} {value}" for key, value in settings.items()))
    return section(f"Sample of {log.name}", made + said)
