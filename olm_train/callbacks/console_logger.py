"""One readable line on stderr every few steps, on rank 0.

step  120/800   loss 3.4521   lr 2.91e-04   grad norm 0.84   12.4k tok/s   wait 0.3%   ETA 4m12s
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated

from olm_data.config.hints import Needs, PositiveInt
from olm_data.counts import duration, scaled
from olm_data.run_log.metric_names import (
    CE_LOSS,
    DATA_WAIT_SHARE,
    EVAL_BPB,
    EVAL_CE_LOSS,
    EVAL_PERPLEXITY,
    EVAL_QUESTIONS,
    EVAL_TOKENS,
    GRAD_NORM,
    LR,
    MFU,
    THROUGHPUT,
    per_second,
)
from olm_train.callbacks.base import Callback, unreached
from olm_train.checkpoint.manifest import step_of
from olm_train.evaluation.held_out import lines_of_groups
from olm_train.evaluation.scoring import line_of_task


@dataclass(kw_only=True)
class ConsoleLoggerCallback(Callback):
    """Lines on the terminal.

    Attributes:
        enabled: print progress.
        log_interval: steps between lines. Lines appear when metrics are read from the device.
        metrics: patterns of further metrics, such as `throughput/*` or `optim/lr*`, that a line of
            their own shows.
        metrics_log_interval: steps between those lines; default: `log_interval`.
    """

    enabled: bool = True
    log_interval: PositiveInt = 10
    metrics: list[str] = field(default_factory=list)
    metrics_log_interval: Annotated[PositiveInt | None, Needs("metrics")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._speed: dict[str, float] = {}

    def pre_train(self) -> None:
        trainer = self.trainer
        if trainer.left:  # nothing is trained
            return
        world, module = trainer.world, trainer.train_module
        device = "CPU" if world.device.type == "cpu" else "CUDA device"
        size, unit = trainer.tokens_at(trainer.stop_step), trainer.data_loader.unit
        trainer.say(
            f"training {scaled(module.num_params)} parameters to step {trainer.stop_step:,} "
            f"({scaled(size)} {unit}) on {world.size} {device} "
            f"rank{'s' if world.size > 1 else ''}, into {trainer.save_folder}"
        )
        loader = trainer.data_loader
        rest = (
            loader.left_over() if (loader.steps or 0) in range(1, trainer.stop_step + 1) else None
        )
        for note in [*([rest] if rest else []), *unreached(trainer)]:
            trainer.say(f"note: {note}")
        for line in [*trainer.chosen, *module.describe()]:
            trainer.say(line)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        trainer, sizes = self.trainer, self.trainer.data_loader.batch_sizes
        self._speed |= {name: v for name, v in metrics.items() if name.startswith(THROUGHPUT)}
        if any(step == first for first, _ in sizes.changes):
            unit = trainer.data_loader.unit
            trainer.say(f"the global batch is {sizes.size(step - 1):,} {unit} from step {step:,}")
        last = step == trainer.stop_step
        self._show(step, metrics, last=last)
        if step % self.log_interval and not last and step != 1:
            return
        total = f"{trainer.stop_step:,}"
        parts = [
            f"step {step:>{len(total)},}/{total}",
            f"loss {metrics[CE_LOSS]:.4f}",
            f"lr {metrics[LR]:.2e}",
            f"grad norm {metrics[GRAD_NORM]:.2f}",
        ]
        if self._speed:
            left = trainer.tokens_at(trainer.stop_step) - trainer.tokens_at(step)
            unit = trainer.data_loader.unit
            rate = self._speed[per_second(unit)]
            seconds_left = left / rate
            parts.append(f"{scaled(rate)} {'tok' if unit == 'tokens' else unit}/s")
            parts.append(f"wait {self._speed[DATA_WAIT_SHARE]:.1%}")
            if MFU in self._speed:
                parts.append(f"MFU {self._speed[MFU]:.1%}")
            if not last:
                parts.append(f"ETA {duration(seconds_left)}")
        trainer.say("   ".join(parts))

    def _show(self, step: int, metrics: Mapping[str, float], *, last: bool) -> None:
        """Print the metrics that are asked for, one a line."""
        every = self.metrics_log_interval or self.log_interval
        names = [n for n in metrics if any(fnmatchcase(n, pattern) for pattern in self.metrics)]
        if names and (step % every == 0 or last or step == 1):
            lines = [f"    {name} = {metrics[name]:.6g}" for name in names]
            self.trainer.say("\n".join([f"metrics of step {step:,}", *lines]))

    def log_evaluation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        for name, result in results.items():
            if EVAL_QUESTIONS in result:
                self.trainer.say(f"evaluation at step {step:,}   {name}   {line_of_task(result)}")
                continue
            bits = f"BPB {result[EVAL_BPB]:.4f}   " if EVAL_BPB in result else ""
            self.trainer.say(
                f"evaluation at step {step:,}   {name}   CE loss {result[EVAL_CE_LOSS]:.4f}   "
                f"PPL {result[EVAL_PERPLEXITY]:.2f}   {bits}({int(result[EVAL_TOKENS]):,} tokens)"
            )
            for line in lines_of_groups(result):
                self.trainer.say(f"    {line}")

    def post_checkpoint_saved(self, folder: str) -> None:
        name = folder.rpartition("/")[2]
        step = step_of(name)
        assert step is not None
        self.trainer.say(f"saved checkpoint {name} ({self.trainer.checkpoints.saved[step]})")

    def post_train(self) -> None:
        trainer = self.trainer
        size, unit = trainer.tokens_at(trainer.step), trainer.data_loader.unit
        trainer.say(f"finished at step {trainer.step:,} ({scaled(size)} {unit})")
