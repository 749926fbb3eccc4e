"""`olm-train ladder report`: what ladders and mixture searches found, as one self-contained page.

ladder.jsonl, forecasts of runs --> loss by FLOPs, isoFLOP curves, rates, forecast and truth
mixtures.jsonl ------------------> the simplex, or loss by share
                                 --olm_data/page.py--> one .html file
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from olm_data.config.values import Values
from olm_data.page import COLOURS, colours, joined, note, section, svg, write_page
from olm_data.run_log.lines import read_lines
from olm_train.extensions.ladder.best import BASELINES, Answer, answer
from olm_train.extensions.ladder.config import LadderConfig
from olm_train.extensions.ladder.fit import DRAWS, Fit, fitted, of_one_compute
from olm_train.extensions.ladder.forecast import NORMAL_90, SCORES, ForecastScore
from olm_train.extensions.ladder.law import Floats, band, resampled
from olm_train.extensions.ladder.mixtures import Search, SearchConfig
from olm_train.extensions.ladder.points import RESULTS, Point, as_runs, frontier, read_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def write_report(files: Sequence[str], output: str) -> Path:
    """Write the page of some ladder.yaml and mix-search.yaml files; return its path.

    Raises:
        InputError: too few points are trained.
        UsageError: matplotlib is not installed.
    """
    facts, sections = list[tuple[str, str]](), list[str]()
    for file in files:
        if "manifest" in Values.read(file, example="ladder.yaml").data:
            search = Search.open(SearchConfig.read(file))
            found = answer(search)
            facts += [
                ("leave-one-out error", f"{found.leave_one_out_error:.3%}"),
                ("mixtures", f"{found.points}"),
            ]
            sections.append(simplex_section(search, found))
            continue
        folder = Path(LadderConfig.read(file).folder)
        points = read_points(folder / RESULTS)
        fit = fitted(points)
        held_out = fit.held_out_error
        facts += [
            ("held-out error", "" if held_out is None else f"{held_out:+.2%}"),
            ("points", f"{fit.points}"),
            ("alpha", f"{fit.law.alpha:.3f}"),
            ("beta", f"{fit.law.beta:.3f}"),
        ]
        sections += [
            curves_section(frontier(points), fit),
            compute_section(frontier(points), fit),
            rates_section(points),
            scores_section(list(read_lines(folder / SCORES, ForecastScore))),
        ]
    return write_page(output, "olm ladder", facts, sections)


def _sizes(points: Sequence[Point]) -> Iterator[tuple[int, str, list[Point]]]:
    """Yield each size, its colour, and its points by their tokens."""
    sizes = sorted({point.parameters for point in points})
    for size, colour in zip(sizes, colours(), strict=False):
        mine = [point for point in points if point.parameters == size]
        yield size, colour, sorted(mine, key=lambda point: point.tokens)


def curves_section(points: Sequence[Point], fit: Fit) -> str:
    """Return losses by FLOPs: points, the law of each size, and its band."""
    runs = as_runs(points)
    laws = resampled(runs, fit.law, DRAWS)

    def draw(axes: Axes) -> None:
        for size, colour, mine in _sizes(points):
            tokens = np.geomspace(mine[0].tokens, mine[-1].tokens, 40)
            flops = np.exp(
                np.interp(np.log(tokens), *np.log([(p.tokens, p.flops) for p in mine]).T)
            )
            drawn = [law.loss(size, tokens) for law in laws]
            axes.fill_between(flops, *band(np.array(drawn)), color=colour, alpha=0.18)
            axes.plot(flops, fit.law.loss(size, tokens), color=colour, label=f"{size:,}")
            axes.plot([p.flops for p in mine], [p.loss for p in mine], "o", color=colour)
        _losses(axes, "FLOPs", "parameters")

    alt = f"Loss by FLOPs of {len(points)} points, and the fitted law of each size"
    legend = note(
        "Lines: the law; bands: 90 %, of the law (of synthetic ladders they held the truth in 87 "
        "to 92 %); points: runs."
    )
    return section("Loss by compute", joined([svg(draw, alt), legend]))


def compute_section(points: Sequence[Point], fit: Fit) -> str:
    """Return isoFLOP curves: losses by size, where sizes were trained with one compute."""
    runs, flops = as_runs(points), np.array([point.flops for point in points])
    groups = [g for g in of_one_compute(flops) if len(set(runs.parameters[g])) > 1]
    if not groups:
        return ""

    def draw(axes: Axes) -> None:
        for group, colour in zip(groups, colours(), strict=False):
            size, per_token = runs.parameters[group], flops[group] / runs.tokens[group]
            order, compute = np.argsort(size), float(np.exp(np.log(flops[group]).mean()))
            sizes = np.geomspace(size.min(), size.max(), 40)
            at = np.interp(np.log(sizes), np.log(size[order]), np.log(per_token[order]))
            law = fit.law.loss(sizes, compute / np.exp(at))
            axes.plot(sizes, law, color=colour, label=f"{compute:.2g}")
            axes.plot(size, runs.loss[group], "o", color=colour)
        _losses(axes, "parameters", "FLOPs")

    return section("Loss by size, at one compute", svg(draw, "Loss by parameters at equal FLOPs"))


def rates_section(points: Sequence[Point]) -> str:
    """Return losses by peak rate, of sizes, lengths and batches with several."""
    sweeps: dict[tuple[int, int, int], list[Point]] = {}
    for point in sorted(points, key=lambda point: point.lr):
        sweeps.setdefault((point.parameters, point.tokens, point.batch), []).append(point)
    sweeps = {key: mine for key, mine in sweeps.items() if len({p.lr for p in mine}) > 1}
    if not sweeps:
        return ""

    def draw(axes: Axes) -> None:
        for ((size, tokens, _), mine), colour in zip(sweeps.items(), colours(), strict=False):
            label = f"{size:,} x {tokens:,}"
            axes.plot([p.lr for p in mine], [p.loss for p in mine], "o-", color=colour, label=label)
        _losses(axes, "peak rate", "parameters x tokens")

    return section("Rates", svg(draw, f"Loss by peak rate, {len(sweeps)} sweeps"))


def scores_section(scores: Sequence[ForecastScore]) -> str:
    """Return how forecasts compare with what the runs came to."""
    if not scores:
        return ""

    def draw(axes: Axes) -> None:
        for place, score in enumerate(scores):
            reach = NORMAL_90 * abs(score.loss - score.forecast) / max(abs(score.sigmas), 1e-9)
            said, true = (None, None) if place else ("forecast, 90 %", "truth")
            axes.errorbar(place, score.forecast, yerr=reach, fmt="o", capsize=6, color=COLOURS[0],
                          label=said)  # fmt: skip
            axes.plot(place, score.loss, "D", color=COLOURS[1], label=true)
        names = [f"{s.run}\n{s.error:+.2%}, {s.times:.3g} x the FLOPs" for s in scores]
        axes.set_xticks(range(len(scores)), names)
        axes.set_xlim(-0.6, len(scores) - 0.4)
        axes.set_ylabel("loss, nats a token")
        axes.legend(frameon=False)

    return section("Forecasts and truth", svg(draw, f"Loss by forecast of {len(scores)} runs"))


def simplex_section(search: Search, found: Answer) -> str:
    """Return the mixtures of a search: a triangle of three sources, else losses by share."""
    points = search.done()
    shares = np.array([search.array(point.shares) for point in points])
    losses = np.array(
        [sum(w * point.losses[n] for n, w in search.weights.items()) for point in points]
    )
    marks = {
        name: np.array([getattr(row, name) for row in found.shares])
        for name in ("best", *BASELINES)
    }
    draw = _triangle if len(search.names) == 3 else _by_share

    alt = f"Mean loss of {len(points)} mixtures of {', '.join(search.names)}"
    picture = svg(lambda axes: draw(axes, search.names, shares, losses, marks), alt, height=4.6)
    return section("Mixtures", joined([picture, note(found.verdict)]))


SIGNS = {"best": "*", "natural": "s", "uniform": "^"}


def _triangle(
    axes: Axes, names: list[str], shares: Floats, losses: Floats, marks: dict[str, Floats]
) -> None:
    corners = np.array([[0, 0], [1, 0], [0.5, 0.866]])
    axes.fill(*corners.T, fill=False, edgecolor="#888", linewidth=1)
    for name, (x, y) in zip(names, corners, strict=True):
        below = y == 0
        axes.annotate(name, (x, y), xytext=(0, -12 if below else 6), ha="center",
                      textcoords="offset points")  # fmt: skip
    x, y = (shares @ corners).T
    seen = axes.scatter(x, y, c=losses, cmap="viridis_r", s=36)
    for (name, mark), colour in zip(marks.items(), colours(), strict=False):
        axes.plot(*(mark @ corners), SIGNS[name], color=colour, markersize=11, label=name,
                  markerfacecolor="none" if name != "best" else colour)  # fmt: skip
    axes.figure.colorbar(seen, ax=axes, label="mean loss, nats a token")
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.legend(frameon=False, loc="upper right")


def _by_share(
    axes: Axes, names: list[str], shares: Floats, losses: Floats, marks: dict[str, Floats]
) -> None:
    for name, mine, best, colour in zip(names, shares.T, marks["best"], colours(), strict=False):
        axes.plot(mine, losses, "o", color=colour, label=name)
        axes.axvline(best, color=colour, linestyle=":", linewidth=1)
    axes.set_xlabel("share (dotted: in the best mixture)")
    axes.set_ylabel("mean loss, nats a token")
    axes.legend(frameon=False)


def _losses(axes: Axes, by: str, title: str) -> None:
    axes.set_xscale("log")
    axes.set_xlabel(by)
    axes.set_ylabel("loss, nats a token")
    axes.legend(frameon=False, title=title)
