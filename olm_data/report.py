"""One self-contained HTML page about a run: what was asked, what was got, how training went.

    lock + datasets   -> mixture wanted and got, document lengths
    run folder        -> loss, validation, learning rate, throughput, generated sample

Reads JSON, arrays and the run's logs; never torch, never the network. Pictures are inline SVG.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from olm_data.errors import InputError
from olm_data.mixture.compile import Lock
from olm_data.page import COLOURS, colours, section, svg, table, write_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LENGTH_SAMPLE_SHARDS = 16  # document lengths are drawn from at most this many shards a source


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


def write_report(lock_path: str, run: str | None, output: str) -> Path:
    """Write the report of a mixture lock, and of a run of it if given.

    Args:
        lock_path: `mixture.lock.json`.
        run: save_folder of a training run, or None.
        output: path of the HTML file; replaced as a whole.

    Returns:
        The path written.
    """
    lock = Lock.read(lock_path)
    log = RunLog.read(Path(run)) if run else None
    sections = [_mixture_section(lock), _length_section(lock)]
    if log is not None:
        sections += [_training_section(log), _speed_section(log), _sample_section(log)]
    return write_page(
        output, f"olm report: {Path(run or lock_path).name}", _facts(lock, log), sections
    )


def _facts(lock: Lock, log: RunLog | None) -> list[tuple[str, str]]:
    facts = [
        ("sources", f"{len(lock.sources)}"),
        ("rows planned", f"{lock.total_rows:,}"),
        ("tokens planned", f"{lock.total_rows * lock.sequence_length:,}"),
        ("sequence length", f"{lock.sequence_length:,}"),
        ("lock", str(lock.digest)[:12]),
    ]
    if log is not None and log.steps:
        facts += [("steps trained", f"{log.steps[-1]['step']:,}")]
        _, loss = log.series("train/CE loss")
        if loss:
            facts.append(("last loss", f"{loss[-1]:.3f}"))
    return facts


def _mixture_section(lock: Lock) -> str:
    names = [source.name for source in lock.sources]
    rows, wanted, got, labels = [], [], [], []
    for stage in lock.stages:
        shares = [float(Fraction(share)) for share in stage.wanted]
        for i, name in enumerate(names):
            drawn = stage.rows_by_source[i]
            share = drawn / stage.rows if stage.rows else 0.0
            rows.append(
                (
                    stage.name,
                    name,
                    f"{lock.sources[i].tokens:,}",
                    f"{drawn * lock.sequence_length:,}",
                    f"{drawn / lock.sources[i].rows:.3f}",
                    f"{100 * shares[i]:.3f} %",
                    f"{100 * share:.3f} %",
                )
            )
            labels.append(f"{stage.name}: {name}" if len(lock.stages) > 1 else name)
            wanted.append(100 * shares[i])
            got.append(100 * share)

    def draw(axes: Axes) -> None:
        place = np.arange(len(labels))
        axes.barh(place - 0.2, wanted, 0.36, color="#c9ced6", label="wanted")
        axes.barh(place + 0.2, got, 0.36, color=COLOURS[0], label="got")
        axes.set_yticks(place, labels)
        axes.invert_yaxis()
        axes.set_xlabel("share of tokens, %")
        axes.legend(frameon=False)

    picture = svg(draw, height=1.2 + 0.45 * len(labels))
    head = ("stage", "source", "tokens available", "tokens drawn", "epochs", "wanted", "got")
    return section("Mixture", picture + table(head, rows))


def _length_section(lock: Lock) -> str:
    lengths: dict[str, np.ndarray] = {}
    rows = []
    for source, dataset in zip(lock.sources, lock.open_datasets(), strict=True):
        shards = len(dataset.manifest.shards)
        chosen = sorted({i * shards // LENGTH_SAMPLE_SHARDS for i in range(LENGTH_SAMPLE_SHARDS)})
        ends = [dataset.shard(i).ends.astype(np.int64) for i in chosen]
        sample = np.concatenate([np.diff(e, prepend=0) for e in ends])
        lengths[source.name] = sample
        low, middle, high = np.percentile(sample, [10, 50, 90])
        rows.append(
            (
                source.name,
                f"{dataset.documents:,}",
                f"{dataset.tokens / dataset.documents:,.0f}",
                f"{low:,.0f}",
                f"{middle:,.0f}",
                f"{high:,.0f}",
                f"{sample.max():,}",
                f"{100 * np.mean(sample > lock.sequence_length):.1f} %",
            )
        )
    shortest = min(int(sample.min()) for sample in lengths.values())
    longest = max(int(sample.max()) for sample in lengths.values())
    bins = np.geomspace(shortest, longest + 1, 60)

    def draw(axes: Axes) -> None:
        for colour, (name, sample) in zip(colours(), lengths.items(), strict=False):
            share, _ = np.histogram(sample, bins, weights=sample / sample.sum())
            axes.stairs(100 * share, bins, fill=True, alpha=0.35, color=colour)
            axes.stairs(100 * share, bins, color=colour, label=name)
        axes.axvline(lock.sequence_length, color="#888", linestyle=":", linewidth=1)
        axes.set_xscale("log")
        axes.set_xlabel("document length, tokens (dotted: sequence length)")
        axes.set_ylabel("share of the source's tokens, %")
        axes.legend(frameon=False)

    head = ("source", "documents", "mean", "10 %", "median", "90 %", "longest", "longer than a row")
    return section("Document lengths", svg(draw) + table(head, rows))


def _training_section(log: RunLog) -> str:
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
    ]
    sets = table(("held-out set", "step", "cross entropy", "perplexity"), rows) if rows else ""
    return section("Training", svg(draw) + f'<div class="pair">{small}</div>' + sets)


def _speed_section(log: RunLog) -> str:
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


def _sample_section(log: RunLog) -> str:
    if log.sample is None:
        return ""
    prompt, text = html.escape(log.sample["prompt"]), html.escape(log.sample["text"])
    made = f'<pre><b class="prompt">{prompt}</b>{text}</pre>'
    settings = {k: v for k, v in log.sample.items() if k not in ("prompt", "text", "ids")}
    note = html.escape(", ".join(f"{key} {value}" for key, value in settings.items()))
    return section("Sample", f"{made}<p class='note'>{note}</p>")
