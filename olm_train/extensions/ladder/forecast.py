"""The loss of a large run, said before it is trained, kept in its folder, and graded afterwards.

ladder.jsonl -> law, bands --train.yaml--> RUN/forecast.json
RUN/forecast.json, log of RUN -> Score -> scores.jsonl beside the ladder, once it has ended
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from olm_data.bounded_json import MalformedJson, decode
from olm_data.errors import InputError, UsageError
from olm_data.printing import Excess, Loss, ShareError
from olm_data.regular_files import read_regular
from olm_data.run_log.lines import append_line, malformed_log, read_lines, replace_file
from olm_data.run_log.log import RunLog
from olm_data.storage.store import is_remote
from olm_train.duration import run_length
from olm_train.estimate.flops import flops_of_steps
from olm_train.extensions.ladder.config import LadderConfig
from olm_train.extensions.ladder.fit import DRAWS, determined
from olm_train.extensions.ladder.law import band, resampled
from olm_train.extensions.ladder.plan import judged_by, loader_of, refuse_growing, resolved
from olm_train.extensions.ladder.points import RESULTS, Point, as_runs, frontier, read_points
from olm_train.extensions.ladder.run import losses

FORECAST, SCORES = "forecast.json", "scores.jsonl"
FARTHEST = 10.0
"""Times the compute of a ladder's largest point that is forecast without `--far`."""
MARKS = 17
"""Lengths that a forecast is kept for: from 1/64 of the run to all of it."""
NORMAL_90 = 1.6449
MAX_FORECAST = 1 << 20


class Mark(msgspec.Struct, frozen=True):
    """What a run of so many tokens, decayed there, would come to.

    Attributes:
        low, high: the 90 % band: of the law and of a run about it.
    """

    tokens: int
    loss: Loss
    low: Loss
    high: Loss

    @property
    def sigma(self) -> float:
        """The standard deviation of a normal loss with such a band."""
        return (self.high - self.low) / (2 * NORMAL_90)


class Forecast(msgspec.Struct, frozen=True):
    """What a ladder says of a run.

    Attributes:
        dataset: held-out set whose loss it is.
        times: its FLOPs over those of the ladder's largest point.
        warnings: what the ladder leaves open.
        marks: the last one is the end of the run.
    """

    COLUMNS: ClassVar = {"marks": None}

    dataset: str
    parameters: int
    tokens: int
    flops: float
    times: float
    loss: Loss
    low: Loss
    high: Loss
    warnings: list[str]
    marks: list[Mark]

    def at(self, tokens: int) -> Mark:
        """Return the forecast for a part of the run, between the marks by the log of tokens."""
        seen = np.log([mark.tokens for mark in self.marks])
        columns = ([getattr(mark, name) for mark in self.marks] for name in ("loss", "low", "high"))
        return Mark(tokens, *(float(np.interp(np.log(tokens), seen, each)) for each in columns))


class ForecastScore(msgspec.Struct, frozen=True):
    """How a run compares with its forecast.

    Attributes:
        error: (forecast - loss) / loss.
        sigmas: how far the loss is above the forecast, in standard deviations.
        times: how far the run was beyond the ladder, in FLOPs.
        ended: it has trained all that was forecast.
    """

    run: str
    step: int
    tokens: int
    loss: Loss
    forecast: Loss
    error: ShareError
    sigmas: Excess
    times: float
    ended: bool


def forecast(ladder: LadderConfig, target: str, options: tuple[str, ...], far: bool) -> Forecast:
    """Say what a run of `target` will come to, and write it into the run's folder.

    Raises:
        InputError: the ladder does not determine a law, or the run is too far beyond it.
    """
    points = frontier(read_points(Path(ladder.folder) / RESULTS))
    config = resolved(target, options)
    if is_remote(config.trainer.save_folder):
        raise UsageError("a forecast is kept in a local folder", where="trainer.save_folder")
    dataset = judged_by(ladder, config)
    refuse_growing(config, "the run")
    loader, size, length = loader_of(config), config.model.num_params, config.trainer
    _, steps = run_length(loader, size, length.max_duration, length.hard_stop)
    flops = flops_of_steps(config.model, loader, range(steps))
    said = foreseen(points, size, loader.tokens_before(steps), flops, dataset)
    if said.times > FARTHEST and not far:
        raise InputError(
            f"the run takes {said.times:,.3g} times the FLOPs of the ladder's largest point",
            where=target,
            why=f"beyond {FARTHEST:g} times a law is not known to hold",
            fix="add larger points, or forecast all the same: --far",
        )
    folder = Path(config.trainer.save_folder)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / FORECAST, msgspec.json.encode(said) + b"\n")
    return said


def foreseen(
    points: list[Point], parameters: int, tokens: int, flops: float, dataset: str
) -> Forecast:
    """Return what points say of a run."""
    runs = as_runs(points)
    law, spread, warnings = determined(runs)
    laws, random = resampled(runs, law, DRAWS), np.random.default_rng(0)
    lengths = np.geomspace(max(tokens / 64, 1), tokens, MARKS)
    drawn = np.array([each.loss(parameters, lengths) for each in laws])  # [draws, marks]
    drawn *= 1 + spread * random.standard_t(len(runs.loss) - 5, (len(laws), 1))
    low, high = band(drawn)
    marks = [
        Mark(round(d), *map(float, numbers))
        for d, *numbers in zip(lengths, law.loss(parameters, lengths), low, high, strict=True)
    ]
    return Forecast(
        dataset=dataset,
        parameters=parameters,
        tokens=tokens,
        flops=flops,
        times=flops / max(point.flops for point in points),
        loss=marks[-1].loss,
        low=marks[-1].low,
        high=marks[-1].high,
        warnings=warnings,
        marks=marks,
    )


def grade(ladder: LadderConfig, run: str) -> ForecastScore:
    """Compare a run with its forecast at its last evaluation; keep the score once it has ended.

    Raises:
        InputError: it has no forecast, or no evaluation yet.
    """
    folder = Path(run)
    try:
        said = decode(read_regular(folder / FORECAST, MAX_FORECAST), Forecast)
    except FileNotFoundError as error:
        raise InputError(
            "the run has no forecast",
            where=run,
            fix="olm-train ladder predict ladder.yaml train.yaml, before it is trained",
        ) from error
    except MalformedJson as error:
        raise malformed_log(folder / FORECAST, str(error)) from None
    seen = {step.step: step.tokens for step in RunLog.read(folder).steps}
    found = {step: loss for step, loss in losses(folder, said.dataset).items() if step in seen}
    if not found:
        raise InputError(f"the run has no loss of {said.dataset} yet", where=run)
    step = max(found)
    tokens, loss = seen[step], found[step]
    mark = said.at(tokens)
    score = ForecastScore(
        run=folder.absolute().name,
        step=step,
        tokens=tokens,
        loss=loss,
        forecast=mark.loss,
        error=(mark.loss - loss) / loss,
        sigmas=(loss - mark.loss) / mark.sigma,
        times=said.times,
        ended=tokens >= said.tokens,
    )
    kept = Path(ladder.folder) / SCORES
    if score.ended and score not in read_lines(kept, ForecastScore):
        append_line(kept, msgspec.json.encode(score))
    return score
