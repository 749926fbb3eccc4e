"""What a report shows of a training run: loss and validation, throughput, a generated sample.

    run folder (metrics.jsonl, config.json, sample.json) -> RunLog -> sections

Reads JSON only; never torch.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from olm_data.errors import InputError
from olm_data.page import COLOURS, colours, section, svg, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass
class RunLog:
    """What a training run left behind.

    Attributes:
        steps: one mapping a step, in order: `step`, `tokens` and the metrics by name.
        evals: one mapping an evaluation: `step`, `eval` -> dataset -> metrics.
        sample: the generated sample, or None.
        summary: the run's resolved configuration, or None.
    """

    steps: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
    sample: dict[str, Any] | None = None
    config: dict[str, Any] | None = None

    @classmethod
    def read(cls, folder: Path) -> RunLog:
        """Read `metrics.jsonl`, `sample.json` and `config.json` of a run folder.

        Raises:
            InputError: the folder has no metrics.
        """
        path = folder / "metrics.jsonl"
        if not path.is_file():
            raise InputError(
                "this is not a run folder: it has no metrics.jsonl",
                where=str(folder),
                fix="give the save_folder of a run, or leave --run out for a report on the mixture",
            )
        log = cls()
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            (log.evals if "eval" in entry else log.steps).append(entry)
        for name in ("sample", "config"):
            if (folder / f"{name}.json").is_file():
                setattr(log, name, json.loads((folder / f"{name}.json").read_text()))
        return log

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return (steps, values) of a metric, where it was recorded."""
        pairs = [(entry["step"], entry[name]) for entry in self.steps if name in entry]
        return [step for step, _ in pairs], [value for _, value in pairs]


def training_section(log: RunLog) -> str:
    """Return loss, validation, learning rate and gradient norm over the steps."""
    steps, loss = log.series("train/CE loss")
    if not steps:
        return ""
    validation: dict[str, tuple[list[int], list[float]]] = {}
    for entry in log.evals:
        for name, metrics in entry["eval"].items():
            xs, ys = validation.setdefault(name, ([], []))
            xs.append(entry["step"])
            ys.append(metrics["CE loss"])

    def draw(axes: Axes) -> None:
        axes.plot(steps, loss, color="#9aa3af", linewidth=1, label="train")
        for colour, (name, (xs, ys)) in zip(colours(), validation.items(), strict=False):
            axes.plot(xs, ys, color=colour, marker="o", markersize=3.5, label=f"validation: {name}")
        axes.set_xlabel("step")
        axes.set_ylabel("cross entropy, nats a token")
        axes.legend(frameon=False)

    lr_steps, lr = log.series("optim/lr")
    norm_steps, norm = log.series("optim/total grad norm")

    def draw_lr(axes: Axes) -> None:
        axes.plot(lr_steps, lr, color=COLOURS[1])
        axes.set_xlabel("step")
        axes.set_ylabel("learning rate")

    def draw_norm(axes: Axes) -> None:
        axes.plot(norm_steps, norm, color=COLOURS[3], linewidth=1)
        axes.set_xlabel("step")
        axes.set_ylabel("gradient norm")
        axes.set_yscale("log")

    small = "".join(
        svg(d, width=4.4, height=2.2)
        for d, xs in ((draw_lr, lr_steps), (draw_norm, norm_steps))
        if xs
    )
    rows = [
        (name, f"{xs[-1]:,}", f"{ys[-1]:.4f}", f"{np.exp(min(ys[-1], 700.0)):,.2f}")
        for name, (xs, ys) in validation.items()
        if ys[-1] is not None  # no number: a set without a token, or a loss that overflowed
    ]
    sets = table(("held-out set", "step", "cross entropy", "perplexity"), rows) if rows else ""
    return section("Training", svg(draw) + f'<div class="pair">{small}</div>' + sets)


def speed_section(log: RunLog) -> str:
    """Return tokens a second over the steps."""
    steps, speed = log.series("throughput/tokens per second")
    if not steps:
        return ""

    def draw(axes: Axes) -> None:
        axes.plot(steps, speed, color=COLOURS[2], linewidth=1)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel("tokens/s")

    facts = [("tokens/s, median", f"{np.median(speed):,.0f}")]
    _, wait = log.series("throughput/data wait share")
    if wait:
        facts.append(("time waiting for data", f"{100 * float(np.mean(wait)):.2f} %"))
    _, mfu = log.series("throughput/MFU")
    if mfu:
        facts.append(("MFU, median", f"{100 * float(np.median(mfu)):.1f} %"))
    return section("Throughput", svg(draw, height=2.4) + table(("measure", "value"), facts))


def sample_section(log: RunLog) -> str:
    """Return the text the trained model made."""
    if log.sample is None:
        return ""
    prompt, text = html.escape(log.sample["prompt"]), html.escape(log.sample["text"])
    made = f'<pre><b class="prompt">{prompt}</b>{text}</pre>'
    settings = {k: v for k, v in log.sample.items() if k not in ("prompt", "text", "ids")}
    note = html.escape(", ".join(f"{key} {value}" for key, value in settings.items()))
    return section("Sample", f"{made}<p class='note'>{note}</p>")
