"""The command that trains: `torchrun --nproc-per-node=N -m olm_train.run train.yaml [--a.b=value]`.

    arguments -> YAML + overrides -> RunConfig -> World -> Trainer.fit() -> exit code

torch is imported only once the arguments are understood, so that help and misspellings answer at
once. Rank 0 speaks; an error is told once, by the rank that met it first.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import olm_data
import olm_train
from olm_data.command import for_people
from olm_data.config.values import with_value
from olm_data.errors import OlmError, UsageError, printable, shown
from olm_data.path_kinds import nearest

if TYPE_CHECKING:
    from olm_train.distributed.preempt import Preemption
    from olm_train.distributed.world import World
    from olm_train.run.config import RunConfig
    from olm_train.run.dry_run import DryRunPlan

FLAGS = ("--dry-run", "--strict", "--strict-env", "--debug", "--help", "-h")
OPTIONS = ("--preset", "--gpu", "--mfu")
SCHEMA = Path(__file__).with_name("train.schema.json")
"""For editors, and for `check_names`; `docs/schemas.py` makes it of `RunConfig`."""
CONFIG_OPTIONS = ("--preset", "--diff")
"""Those of `olm-train config`; of the flags it takes those that are no matter of training."""


@dataclass
class Arguments:
    """The command line, split up; nothing is interpreted yet."""

    config: str | None = None
    overrides: list[str] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def split(cls, argv: list[str]) -> Arguments:
        """Split the arguments.

        Raises:
            UsageError: an option that is no flag and has no value, or is given twice; a second
                file.
        """
        arguments = cls()
        rest = iter(argv)
        for text in rest:
            name, _, value = text.partition("=")
            if name in {*OPTIONS, *CONFIG_OPTIONS}:
                arguments._take(name, value if "=" in text else next(rest, ""))
            elif text in FLAGS:
                arguments.flags.add("--help" if text == "-h" else text)
            elif text.startswith("-"):
                known = (*FLAGS, *OPTIONS, *CONFIG_OPTIONS)
                arguments.overrides.append(text if "=" in text else with_value(text, rest, known))
            elif arguments.config is not None:
                raise UsageError(
                    f"two configuration files: {arguments.config} and {text}",
                    fix="give one; change fields of it with --name.of.field=value",
                )
            else:
                arguments.config = text
        plans = "--dry-run" in arguments.flags
        for name in ("--gpu", "--mfu"):
            if name in arguments.options and not plans:
                raise UsageError(f"{name} has no effect without --dry-run", where=name)
        return arguments

    def _take(self, name: str, value: str) -> None:
        if not value or value.startswith("--"):
            raise UsageError(f"{name} needs a value", fix=f"write {name}=...")
        if name in self.options:
            raise UsageError(f"{name} is given twice", fix="give it once")
        self.options[name] = value


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code; errors become messages."""
    return _ended(sys.argv[1:] if argv is None else argv, _run)


def print_config(argv: list[str]) -> int:
    """Print what a file and options come to, for `olm-train config`; return the exit code."""
    return _ended(argv, _print_config)


def _ended(argv: list[str], action: Callable[[Arguments], int]) -> int:
    """Do what the arguments say and return the exit code; errors become messages."""
    try:
        arguments = Arguments.split(argv)
        if "--help" in arguments.flags:
            if _rank() == 0:
                print(inspect.getdoc(action))
            return 0
        return action(arguments)
    except KeyboardInterrupt:
        return _fail("interrupted; run the same command again to go on", 130)
    except Exception as error:
        known = for_people(error, "training")
        if isinstance(known, OlmError):
            return _fail(_trace(argv) or f"error: {shown(str(known))}", known.exit_code)
        return _fail(_trace(argv) or _unexpected(error), 1)


def _resolve(arguments: Arguments) -> RunConfig:
    """Return the configuration of the file, the preset and the options."""
    from olm_data.config.values import Values

    values = Values.read(config_file(arguments.config))
    if "--preset" in arguments.options:
        values.override("--model=null")  # whatever the file's model says
        values.override(f"--model.preset={arguments.options['--preset']}")
    values.override_all(arguments.overrides)
    if "--strict" in arguments.flags:
        values.override("--trainer.load_strict=true")
    if "--strict-env" in arguments.flags:
        values.override("--trainer.callbacks.environment.strict=true")

    from olm_data.config.schema import check_names
    from olm_train.model.flat_form import refuse_flat

    refuse_flat(values)
    check_names(json.loads(SCHEMA.read_bytes()), values)

    from olm_train.run.config import RunConfig

    return RunConfig.resolve(values)


def _print_config(arguments: Arguments) -> int:
    """olm-train config [CONFIG] [--preset NAME] [--name.of.field=value ...] [--diff RUN]

      olm-train config train.yaml --train_module.optim.lr=1e-3
      olm-train config train.yaml --diff runs/first

    Prints the configuration that the file (by default ./train.yaml) and the options come to, as
    YAML.

      --diff RUN              print instead what differs from the configuration of the run (or
                              checkpoint) in that folder
    """
    import yaml

    useless = [*arguments.flags & {"--dry-run"}, *arguments.options.keys() - {*CONFIG_OPTIONS}]
    if useless:
        raise UsageError(f"{useless[0]} is for olm-train run", where=useless[0], fix="leave it out")
    config = _resolve(arguments)
    if run := arguments.options.get("--diff"):
        from olm_train.run.config import config_diff

        print(shown("\n".join(config_diff(run, config)) or "no difference"))
    else:
        from olm_data.config.schema import modeline

        text = yaml.safe_dump(config.as_dict(), sort_keys=False)
        print(f"{modeline(SCHEMA)}\n{shown(text)}", end="")
    return 0


def _run(arguments: Arguments) -> int:
    """Train from a configuration file; run the same command again to go on where it stopped.

      torchrun --nproc-per-node=2 -m olm_train.run train.yaml --train_module.optim.lr=3e-4
      python -m olm_train.run train.yaml --dry-run

    Usage: python -m olm_train.run [CONFIG] [--preset NAME] [--name.of.field=value ...]
                                   [--dry-run [--gpu NAME] [--mfu X]] [--strict]
                                   [--strict-env] [--debug]

      CONFIG                  YAML file; default: ./train.yaml. Paths in it count from its folder.
      --preset NAME           take the model of that name, such as olmo2-1b, instead of the file's
      --name.of.field=value   replaces one field; the value is YAML, such as 3e-4, true or
                              '{value: 100, unit: steps}', after `=` or as the next word. Paths
                              count from the current folder.
                              --name.of.list[0]= is an item, --name.of.mapping["key"]= any key.
      --dry-run               print configuration, mixture, schedule, size, memory of a rank, days
                              and first rows; train nothing. Set WORLD_SIZE for that many ranks.
      --gpu NAME              for --dry-run: the accelerator to plan for; default: h100
      --mfu X                 for --dry-run: share of its peak that is reached; default: 0.4
      --strict                refuse to go on where the newest checkpoint is damaged, instead of
                              from the one before it
      --strict-env            refuse to go on with a run made with other versions or devices
      --debug                 show the traceback of an error
      --help                  show this

    Exit codes: 0 ok, 1 unexpected, 2 usage, 3 validation or digest mismatch, 4 input refused,
    5 local resource, 6 remote storage, 7 conflict, 75 stopped by SIGTERM or SIGUSR1 after saving
    (run the same command again), 130 interrupted. torchrun itself turns every code but 0 into 1.
    """
    if "--diff" in arguments.options:
        raise UsageError(
            "--diff is for olm-train config",
            where="--diff",
            fix="olm-train config train.yaml --diff RUN",
        )
    config = _resolve(arguments)

    from olm_train.distributed.preempt import Preemption  # after it: a wrong name needs no torch

    if "--dry-run" in arguments.flags:
        if _rank() == 0:
            from olm_train.run.dry_run import describe

            size = int(os.environ.get("WORLD_SIZE", "1"))
            nodes = size // int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
            print(shown(describe(config, size, _plan(arguments), nodes=nodes)))
        return 0
    with Preemption(at_once=True) as preemption:
        return _train(config, preemption)


def _train(config: RunConfig, preemption: Preemption) -> int:
    """Meet the other ranks and train; return the exit code."""
    from olm_train.distributed.agreement import require_agreement
    from olm_train.distributed.host_memory import keep_freed_memory
    from olm_train.distributed.preempt import Preempted
    from olm_train.distributed.world import World
    from olm_train.estimate.device_defaults import Capability
    from olm_train.estimate.sharding import Machine

    world = World.start(timeout=timedelta(seconds=config.comm.init_timeout_seconds))
    config, threads = _with_threads(config, world)
    capability = Capability.of(world.device)
    config, chosen = config.on_device(capability)
    config, why = config.fitted(Machine.of(world))
    if world.main and why:
        print(shown("\n".join(why)), file=sys.stderr, flush=True)
    require_agreement(world, config.data_loader.lock().digest, config.as_dict())
    memory = keep_freed_memory(world.device.type, os.environ)
    auto = (
        f"auto on {capability.name}: {', '.join(chosen)} (--dry-run says why)" if chosen else None
    )
    line = "; ".join(filter(None, (auto, threads, memory)))
    trainer = config.build(world, chosen=[line])
    try:
        trainer.fit(preemption)
        code = 0
    except Preempted as stop:
        trainer.say(f"stopped by {stop}; run the same command again to go on from there")
        code = stop.exit_code
    world.stop()
    return code


def _with_threads(config: RunConfig, world: World) -> tuple[RunConfig, str]:
    """Return the configuration with the number of CPU threads, now in use, and a line about it."""
    import torch

    from olm_train.checkpoint.documents import default_work_dir
    from olm_train.checkpoint.manifest import CONFIG
    from olm_train.distributed.threads import Processors, choose, recorded_threads

    folder = Path(config.trainer.work_dir or default_work_dir(config.trainer.save_folder))
    recorded = world.on_main(lambda: recorded_threads(folder / CONFIG))
    mine = choose(config.threads, Processors.here(), os.environ, recorded)
    count, why = min(world.gather(mine))  # the same on each rank: those that wait gain nothing
    torch.set_num_threads(count)
    return replace(config, threads=count), f"CPU threads of a rank: {count} ({why})"


def _plan(arguments: Arguments) -> DryRunPlan:
    """Return what `--gpu` and `--mfu` say.

    Raises:
        UsageError: an unknown accelerator, or no share of its peak.
    """
    from olm_train.estimate.gpus import gpu_named
    from olm_train.run.dry_run import DryRunPlan

    text = arguments.options.get("--mfu", "0.4")
    try:
        mfu = float(text)
    except ValueError:
        mfu = 0.0
    if not 0 < mfu <= 1:
        raise UsageError(f"--mfu is a number above 0, at most 1, not {text}", where="--mfu")
    return DryRunPlan(gpu=gpu_named(arguments.options.get("--gpu", "h100")), mfu=mfu)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _unexpected(error: Exception) -> str:
    """Return the message of an error that nobody foresaw, of our code or of a part of one's own."""
    where = place_outside(error)
    what = f"unexpected error: {type(error).__name__}: {error}"
    place = f"\n  where: {where}" if where else ""
    report = "unless that code is yours, please report it" if where else "please report it"
    return shown(f"{what}{place}\n  fix: run again with --debug for the traceback; {report}")


def _trace(argv: list[str]) -> str:
    """Return the traceback of the error being handled, if --debug asks for it."""
    return shown(traceback.format_exc().rstrip()) if "--debug" in argv else ""


def _fail(message: str, code: int) -> int:
    if _first_to_fail():
        print(message, file=sys.stderr, flush=True)
    return code


def _first_to_fail() -> bool:
    """Whether no other rank has reported an error yet; the store they met in keeps the count.

    torchrun, or a scheduler, stops all ranks when the first one fails, so waiting for rank 0 to
    speak could lose the message.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    from torch.distributed import DistError, TCPStore, is_initialized

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and not is_initialized():
        return True  # they have not met: what fails here may be this machine's alone

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=10),
        )
        return store.add(f"olm_train/failed/{attempt}", 1) == 1
    except DistError:  # the store is gone: better twice than never
        return True


_PACKAGES = {"site-packages", "dist-packages"}
"""Folders of packages, also of those that a user or a system installed."""


def place_outside(error: BaseException) -> str | None:
    """Return `FILE:LINE, in FUNCTION` of the innermost call outside of what is installed.

    Returns:
        None, if all calls are of this package, of installed packages or of Python itself.
    """
    places = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    places += [place for package in (olm_data, olm_train) for place in package.__path__]
    installed = [Path(place).resolve() for place in places]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if not file.is_absolute() or _PACKAGES.intersection(file.parts):
            continue
        if not any(file.resolve().is_relative_to(place) for place in installed):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}"
    return None


NAME = "train.yaml"
MICROBATCH = 4096
"""Tokens, about: whole rows of the lock."""
MICROBATCHES = 4


def config_file(given: str | None) -> str:
    """Return the file with the configuration: the one given, or ./train.yaml.

    Raises:
        UsageError: there is none.
    """
    name = given or NAME
    if os.path.lexists(name):
        return name
    raise UsageError(
        f"there is no configuration {printable(name)}"
        if given
        else f"no configuration file given, and there is no {NAME} here",
        where=os.path.abspath(name),
        fix=nearest(
            name,
            f"olm-train new writes one for your text; in {printable(name)} this is enough:\n"
            + _least(),
        ),
    )


def _least() -> str:
    """Return a configuration that trains on the newest lock of this folder."""
    from olm_data.mixture.lock import Lock

    name, length = "mixture.lock.json", 1
    there = sorted(Path().glob("*.lock.json"), key=lambda path: path.lstat().st_mtime)
    for path in reversed(there):
        with suppress(OlmError):
            name, length = path.name, Lock.read(path).sequence_length
            break
    size = length * max(1, MICROBATCH // length)
    mixture, batch = json.dumps(name), size * MICROBATCHES
    return (
        "    model: {preset: olm-4m}\n"
        f"    data_loader: {{mixture: {mixture}, global_batch_size: {batch}}}\n"
        f"    train_module: {{rank_microbatch_size: {size}}}\n"
        "    trainer: {save_folder: runs/first}"
    )
