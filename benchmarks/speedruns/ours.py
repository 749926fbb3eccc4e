"""Our own run: the quickstart's train.yaml by its own command, but for its length and folders.

    12 steps -> time of a step -> lock as long as the run -> torchrun -m olm_train.run -> evaluate

On a CPU a rank has one thread, and there are as many ranks as cores, as in the quickstart.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import yaml

from olm_data.config.values import Values
from olm_train.checkpoint.portable import open_portable
from olm_train.model.config import DecoderConfig
from olm_train.run.config import RunConfig
from speedruns.budget import TIMED, WARM_UP, Budget, Point, Tuning, evaluated_steps
from speedruns.text import QUICKSTART, Source, lock_of, measure

BENCHMARKS = Path(__file__).resolve().parents[1]


class Ours:
    """Runs of a configuration on sources.

    Args:
        config: a train.yaml.
        sequence_length: tokens of a row.
        ranks: processes, each with one thread on a CPU.
        overrides: fields that are other than in the file, as on the command line.
    """

    def __init__(
        self,
        config: Path,
        sources: Sequence[Source],
        sequence_length: int,
        *,
        ranks: int,
        overrides: Sequence[str] = (),
    ) -> None:
        self._config, self._sources, self._ranks = config, sources, ranks
        self._length, self._overrides = sequence_length, list(overrides)

    @property
    def shape(self) -> DecoderConfig:
        """The shape of the model."""
        with tempfile.TemporaryDirectory() as folder:
            return self._resolved(Path(folder)).model

    @property
    def published(self) -> Tuning:
        """Rate and warm-up of the file."""
        with tempfile.TemporaryDirectory() as folder:
            module = self._resolved(Path(folder)).train_module
        return Tuning(module.optim.lr, module.scheduler.warmup_fraction)

    def tuned(self, tuning: Tuning) -> Ours:
        """Return the same at another rate and warm-up.

        Rates of groups keep their ratio to the peak.
        """
        with tempfile.TemporaryDirectory() as folder:
            module = self._resolved(Path(folder)).train_module
        ratio = tuning.rate / module.optim.lr
        groups = [
            {
                "params": group.params,
                "opts": {n: v * ratio if n == "lr" else v for n, v in group.opts.items()},
            }
            for group in module.optim.group_overrides
        ]
        more = [
            f"--train_module.optim.lr={tuning.rate}",
            f"--train_module.optim.group_overrides={json.dumps(groups)}",
            f"--train_module.scheduler.warmup_fraction={tuning.warmup}",
        ]
        return Ours(
            self._config, self._sources, self._length, ranks=self._ranks,
            overrides=[*self._overrides, *more],
        )  # fmt: skip

    def train(self, budget: Budget, *, seed: int, points: int = 1) -> list[Point]:
        """Train for the budget; return what was measured at its points."""
        steps = budget.fixed_steps or self._calibrate(budget, seed)
        return self._run(steps, seed, points, budget, evaluate=True)

    def _calibrate(self, budget: Budget, seed: int) -> int:
        trial = self._run(WARM_UP + TIMED, seed, 1, budget)
        times = [after.used - before.used for before, after in pairwise(trial)]
        return budget.steps([times[0], *times])

    def _run(
        self, steps: int, seed: int, points: int, budget: Budget, *, evaluate: bool = False
    ) -> list[Point]:
        """Return a point for each step; with `evaluate` those that were evaluated."""
        with tempfile.TemporaryDirectory(prefix="speedrun-") as name:
            folder = Path(name)
            batch = self._resolved(folder).data_loader.global_batch_size
            wanted = sorted(evaluated_steps(steps, points))
            self._start(folder, steps, seed, batch, wanted if evaluate else [])
            every = list(_points(folder / "clock", batch, budget))
            if not evaluate:
                return every
            found = [every[step - 1] for step in wanted]
            for point in found:
                model = open_portable(str(folder / "run"), str(point.step), print).model().eval()
                point.bits = {
                    source.name: measure(model, source.held_out_tokens, source.sizes, self._length)
                    for source in self._sources
                }
            return found

    def _start(self, folder: Path, steps: int, seed: int, batch: int, saved: Sequence[int]) -> None:
        lock = lock_of(self._sources, steps * batch, self._length, folder)
        callbacks = {
            "clock": {"name": "speedruns.clock:Clock", "folder": str(folder / "clock")},
            "checkpointer": {"save_interval": steps, "fixed_steps": list(saved)},
            "speed_monitor": {"data_wait_alarm": 1.0},
        }
        launcher = [
            "-m", "torch.distributed.run", f"--nproc-per-node={self._ranks}",
            "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
        ]  # fmt: skip
        command = [
            sys.executable, *(launcher if self._ranks > 1 else []),
            "-m", "olm_train.run", str(self._config), *self._overrides, f"--seed={seed}",
            f"--data_loader.mixture={lock}", f"--trainer.save_folder={folder / 'run'}",
            f"--trainer.callbacks={json.dumps(callbacks)}",
        ]  # fmt: skip
        paths = os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"our run ended with {done.returncode}:\n{done.stderr[-3000:]}")

    def _resolved(self, folder: Path) -> RunConfig:
        lock = lock_of(self._sources, 1 << 20, self._length, folder)
        values = Values.read(str(self._config))
        values.override_all([*self._overrides, f"--data_loader.mixture={lock}"])
        values.override("--trainer.callbacks={}")
        return RunConfig.resolve(values)


def quickstart(sources: Sequence[Source], *, ranks: int, overrides: Sequence[str] = ()) -> Ours:
    """Return the quickstart's run, in the precision that its run.sh takes on this CPU."""
    length = yaml.safe_load((QUICKSTART / "mix.yaml").read_text())["sequence_length"]
    cpu = Path("/proc/cpuinfo")
    has_bf16 = cpu.exists() and re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", cpu.read_text())
    precision = f"--train_module.dp_config.param_dtype={'bfloat16' if has_bf16 else 'float32'}"
    overrides = [precision, *overrides]
    return Ours(QUICKSTART / "train.yaml", sources, length, ranks=ranks, overrides=overrides)


def _points(folder: Path, batch: int, budget: Budget) -> Iterator[Point]:
    """Yield each step of a run, from what the ranks' clocks wrote."""
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    for lines in zip(*ranks, strict=True):
        step = lines[0][0]
        wall = max(line[1] for line in lines)
        processors = sum(line[2] for line in lines)
        used = processors if budget.processors else wall
        yield Point(step, step * batch, wall, used, {})
