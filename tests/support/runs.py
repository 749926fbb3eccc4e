"""A tiny mixture, configurations on it, and training runs as real processes or in this one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from support.forked import forked, python
from support.polling import wait_until
from support.stand_in import parse_mixture
from support.tokenizing import make_dataset, write_jsonl

from olm_data.config.values import Values
from olm_data.mixture.mix import MixPlan, open_sources
from olm_train.callbacks.base import Callback
from olm_train.checkpoint.load import open_checkpoint
from olm_train.distributed.world import World
from olm_train.run.config import RunConfig
from olm_train.trainer import Trainer

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 24
"""Steps of the tiny mixture at the batch size of `write_config`."""

MANIFEST = """\
version: 1
seed: 5
sequence_length: 32
packing: concat
sources:
  prose: {data: prose, max_epochs: 4}
  code: {data: code, max_epochs: 4}
stages:
  - {name: main, tokens: 4096, weights: {prose: 3, code: 1}}
  - {name: anneal, tokens: 2048, weights: {prose: 1, code: 1}}
"""


def stop(step: int) -> str:
    """The option that ends a run after a step."""
    return f"--trainer.hard_stop={{value: {step}, unit: steps}}"


def make_mixture(folder: Path, tokenizer: Path, places: Mapping[str, str] | None = None) -> Path:
    """Tokenise two sources and a held-out set and mix them; return the lock's path.

    Args:
        places: URLs of sources that are not to lie in the folder.
    """
    text = "the quick brown fox jumps over a lazy dog while seven owls sleep"
    words = text.split()
    prose = [" ".join(words[n % 7 : n % 7 + 2 + n % 11]) + "." for n in range(90)]
    code = [f"def f{n}(x):\n    return x ** {n} + {n * n}\n" for n in range(60)]
    for name, documents in (("prose", prose), ("code", code), ("held", prose[:9] + code[:5])):
        text = write_jsonl(folder / f"{name}.jsonl", documents)
        make_dataset([text], tokenizer, (places or {}).get(name) or folder / name)
    manifest = MANIFEST
    for name, url in (places or {}).items():
        manifest = manifest.replace(f"data: {name},", f"data: '{url}',")
    mixture = parse_mixture(manifest, str(folder / "manifest.yaml"), str(folder))
    lock = folder / "mixture.lock.json"
    MixPlan(mixture, open_sources(mixture), str(folder)).compile().write(lock)
    return lock


def config_values(lock: Path, save_folder: Path) -> dict[str, Any]:
    """A configuration of 24 steps of 8 rows in fp32, evaluated every 9 and saved every 6 steps."""
    return {
        "seed": 1,
        "model": {"d_model": 16, "n_layers": 2, "n_heads": 2, "feed_forward": {"hidden_size": 32}},
        "data_loader": {"mixture": str(lock), "global_batch_size": 256},
        "train_module": {
            "rank_microbatch_size": 128,
            "optim": {"name": "adamw", "lr": 1e-2},
            "scheduler": {"name": "cosine_with_warmup", "warmup": 4},
        },
        "trainer": {
            "save_folder": str(save_folder),
            "metrics_collect_interval": 2,
            "callbacks": {
                "checkpointer": {"save_interval": 6},
                "console_logger": {"log_interval": 1},
                "lm_evaluator": {
                    "datasets": {"held": str(lock.parent / "held")},
                    "eval_interval": 9,
                },
            },
        },
    }


def write_config(path: Path, lock: Path, save_folder: Path) -> Path:
    """Write `config_values` as YAML."""
    path.write_text(yaml.safe_dump(config_values(lock, save_folder)))
    return path


def build_trainer(
    lock: Path,
    save_folder: Path,
    *overrides: str,
    stop: int | None = None,
    quiet: bool = False,
    callbacks: Mapping[str, Callback] | None = None,
    world: World | None = None,
) -> Trainer:
    """Build a trainer in this process from `config_values` and overrides.

    Args:
        stop: the step after which the run stops.
        quiet: evaluate nothing.
    """
    values = Values(config_values(lock, save_folder))
    given = [f"--trainer.hard_stop={{value: {stop}, unit: steps}}"] if stop is not None else []
    if quiet:
        given.append("--trainer.callbacks.lm_evaluator.enabled=false")
    for override in (*given, *overrides):
        values.override(override)
    trainer = RunConfig.resolve(values).build(world or World())
    for name, callback in (callbacks or {}).items():
        callback.trainer = trainer
        trainer.callbacks[name] = callback
    return trainer


def one_step_trainer(lock: Path, folder: Path, *more: str) -> Trainer:
    """A trainer that stops after one step and evaluates nothing."""
    return build_trainer(lock, folder, *more, stop=1, quiet=True)


def group_world() -> World:
    """The world of a process that `support.distributed.run_ranks` started."""
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        control_group=dist.new_group(backend="gloo"),
        exchange_group=dist.new_group(backend="gloo"),
    )


def command(
    config: Path, *options: str, ranks: int = 1, interpreter: str = sys.executable
) -> list[str]:
    """The command line of a run, under torchrun where there are several ranks."""
    launcher = [interpreter]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, "-m", "olm_train.run", str(config), *options]


def environment() -> dict[str, str]:
    """The environment of a run: this checkout, one thread a process."""
    return dict(os.environ, PYTHONPATH=str(REPOSITORY), OMP_NUM_THREADS="1")


def run(config: Path, *options: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run to the end."""
    if ranks == 1:
        return forked("olm_train.run", config, *options, environment=environment())
    return subprocess.run(
        command(config, *options, ranks=ranks, interpreter=python()),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=1200,
    )


def run_until(
    text: str, number: signal.Signals, config: Path, *options: str, ranks: int = 1
) -> tuple[int, str]:
    """Run, send a signal when a line of stderr contains `text`; return exit code and stderr.

    The process that wrote the line does nothing more before it has the signal (see
    `support.pausing`). SIGKILL ends all processes of the run, any other one goes to the launcher.
    """
    words = command(config, *options, ranks=ranks)
    place = words.index("olm_train.run")
    words[place - 1 : place + 1] = [str(Path(__file__).with_name("pausing.py")), text]
    with subprocess.Popen(
        words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        lines = []
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if text in line and process.poll() is None:
                _deliver(number, process)
                text = "\n\n"  # no line has it: a signal is sent once
    return process.returncode, "".join(lines)


def _deliver(number: signal.Signals, run: subprocess.Popen[str]) -> None:
    """Give a run that stands still a signal, and let it go on."""
    them = (run.pid, *children(run.pid))
    try:
        writer = wait_until(lambda: stopped(run.pid), "the run stands still")
        if number != signal.SIGKILL:
            run.send_signal(number)
            wait_until(lambda: _waits_for(writer, number), f"{number.name} is passed on")
            os.kill(writer, signal.SIGCONT)
            return
    except BaseException:
        number = signal.SIGKILL
        raise
    finally:
        if number == signal.SIGKILL:
            for each in them:
                os.kill(each, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """The processes that the first thread of a process started, and that have not ended."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def stopped(pid: int) -> int | None:
    """The process that stands still by SIGSTOP: this one or a child of it.

    Raises:
        ProcessLookupError: it has ended.
    """
    if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
        raise ProcessLookupError(f"process {pid} has ended")
    for candidate in (pid, *children(pid)):
        with contextlib.suppress(FileNotFoundError):  # a child may have ended by now
            if Path(f"/proc/{candidate}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return candidate
    return None


def _waits_for(pid: int, number: signal.Signals) -> bool:
    """Whether a process that stands still has been sent a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(status.partition("ShdPnd:")[2].split()[0], 16) >> (number - 1) & 1)


def metrics(save_folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without throughput and clock time."""
    lines = [json.loads(line) for line in (save_folder / "metrics.jsonl").open()]
    return [
        {
            name: value
            for name, value in line.items()
            if name != "time" and not name.startswith("throughput/")
        }
        for line in lines
    ]


def steps_of(save_folder: Path) -> list[dict[str, Any]]:
    """The lines of steps, without those of evaluations."""
    return [line for line in metrics(save_folder) if "eval" not in line]


def tensors(trainer: Callable[[], Trainer], folder: Path) -> dict[str, torch.Tensor]:
    """Weights and optimiser state of a checkpoint, flat, read into a fresh train module."""
    state = trainer().train_module.state_dict()
    open_checkpoint(folder, World()).load_tensors(state, World())  # type: ignore[arg-type]
    return {f"{part}.{name}": value for part in state for name, value in state[part].items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors have the same names and the same bytes."""
    return one.keys() == other.keys() and all(
        one[name].numpy().tobytes() == other[name].numpy().tobytes() for name in one
    )


SIX_STEPS = (
    "--trainer.callbacks.lm_evaluator.enabled=false",
    "--trainer.callbacks.checkpointer={save_interval: 2}",
    "--trainer.hard_stop={value: 6, unit: steps}",
)
"""Options of a short run that leaves three checkpoints."""


def six_steps(lock: Path, folder: Path) -> Path:
    """Run `SIX_STEPS`; return the save folder."""
    build_trainer(lock, folder, *SIX_STEPS).fit()
    return folder
