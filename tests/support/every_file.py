"""Every kind of file that the product writes, false in many ways, and every command that reads it.

    Workplace.make -> datasets, lock, run, export, old checkpoint: what users hand to each other
    wrong(seed)    -> one file of it changed; digests above it made good, as a stranger would
    Command.run    -> the real entry point in a forked child: exit code, output, CPU time, memory

A forked child costs no imports, so that a walk takes thousands of cases a minute. `main` is for a
process of its own: pytest is never forked, as what other tests left in it, threads and gigabytes,
is no part of a command.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
import yaml
from support.false_files import change, make_good
from support.runs import MANIFEST, config_values, make_mixture

CODES = {0, 2, 3, 4, 5, 6, 7, 75}
"""Exit codes of STYLE that a false file may lead to: anything but 1."""
CPU_SECONDS, MEGABYTES = 8, 300
"""Bounds of one command, above what it takes on honest files; a busy machine counts double."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    output: str
    cpu: float
    megabytes: float


@dataclass(frozen=True)
class Command:
    """A command line of the product.

    Attributes:
        module: `olm_data`, or a module of `olm_train` with a `main`.
        words: its arguments, with paths inside the workplace.
        reads: patterns of the files it reads.
    """

    module: str
    words: tuple[str, ...]
    reads: tuple[str, ...]

    def run(self, place: Path, limit: float = 600) -> Outcome:
        """Run it in a child of this process, in `place`."""
        log = place.with_suffix(".log")
        with open(log, "wb") as file:
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                _child(self, place, file.fileno())
        end = time.monotonic() + limit
        while True:
            found, status, usage = os.wait4(pid, os.WNOHANG)
            if found:
                break
            if time.monotonic() > end:
                os.killpg(pid, signal.SIGKILL)
                _, status, usage = os.wait4(pid, 0)
                break
            time.sleep(0.005)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        output = log.read_bytes().decode(errors="surrogateescape")
        code = os.waitstatus_to_exitcode(status)
        return Outcome(code, output, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def _child(command: Command, place: Path, log: int) -> None:
    code = 1
    try:
        os.setsid()
        os.chdir(place)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 28, 1 << 28))
        sys.argv = [command.module, *command.words]
        code = _main(command)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _main(command: Command) -> int:
    import click

    from olm_train.cli import cli

    if command.module == "olm_data":
        from olm_data.cli import main

        main()
        return 0
    if command.module == "run":
        from olm_train.run.command import main as train

        return int(train(list(command.words)))
    if command.module == "config":
        from olm_train.run.command import print_config

        return int(print_config(list(command.words)))
    found = cli.get_command(click.Context(cli), command.module.replace("_", "-"))
    assert found is not None
    found.main(list(command.words))
    return 0


DATASET = ("prose/*",)
LOCKS = ("*.lock.json",)
BEST = ("best*", "row-plans/*/*")
RUN = ("run/*", "run/step00000012/*", "mixture.lock.json")
COMMANDS = [
    Command("olm_data", ("verify", "prose"), DATASET),
    Command("olm_data", ("stats", "prose", "--json"), DATASET),
    Command("olm_data", ("show", "document", "prose"), DATASET),
    Command("olm_data", ("show", "document", "prose", "--id", "prose-7"), DATASET),
    Command("olm_data", ("status", "prose"), DATASET),
    Command("olm_data", ("doctor", "prose", "--clean", "--dry-run"), DATASET),
    Command("olm_data", ("export", "prose", "--to", "megatron", "-o", "out"), DATASET),
    Command("olm_data", ("export", "prose", "--to", "mds", "-o", "out"), DATASET),
    Command("olm_data", ("mix", "prose", "--compare-packing", "--sequence-length", "32"), DATASET),
    Command("olm_data", ("mix", "manifest.yaml", "-o", "new.lock.json"), (*DATASET, "*.yaml")),
    Command("olm_data", ("verify", "mixture.lock.json"), (*DATASET, "mixture.lock.json")),
    Command("olm_data", ("show", "row", "mixture.lock.json", "0"), (*DATASET, "*.lock.json")),
    Command(
        "olm_data",
        ("show", "step", "mixture.lock.json", "3", "--global-batch", "256"),
        (*DATASET, "*.lock.json"),
    ),
    Command(
        "olm_data",
        ("show", "document", "mixture.lock.json", "--id", "prose-7"),
        (*DATASET, "*.json"),
    ),
    Command("olm_data", ("show", "document", "best.lock.json", "--id", "prose-7"), BEST),
    Command("olm_data", ("show", "row", "best.lock.json", "1"), (*BEST, *DATASET)),
    Command("olm_data", ("verify", "best.lock.json"), BEST),
    Command("olm_data", ("mix", "--diff", "mixture.lock.json", "best.lock.json"), LOCKS),
    Command(
        "olm_data",
        ("mix", "manifest.yaml", "--extend", "6656", "-o", "longer.lock.json"),
        ("*.lock.json", "manifest.yaml"),
    ),
    Command("olm_data", ("show", "step", "mixture.lock.json", "5", "--run", "run"), RUN),
    Command("olm_data", ("verify", "run"), RUN),
    Command("olm_data", ("report", "mixture.lock.json", "--run", "run"), RUN),
    Command("run", ("train.yaml",), (*RUN, "run/step00000012/*", *DATASET, "train.yaml")),
    Command("run", ("train.yaml", "--dry-run"), ("train.yaml", "mixture.lock.json", *DATASET)),
    Command("config", ("train.yaml", "--diff", "run"), RUN),
    Command("generate", ("run", "--max-new-tokens", "3"), RUN),
    Command("evaluate", ("run", "--data", "held"), (*RUN, "held/*")),
    Command("export", ("run", "--output", "out"), RUN),
    Command("generate", ("exported", "--max-new-tokens", "3"), ("exported/*",)),
    Command("evaluate", ("exported", "--data", "held"), ("exported/*",)),
    Command(
        "run",
        (
            *("train.yaml", "--trainer.save_folder=next", "--trainer.load_path=exported"),
            *("--trainer.load_trainer_state=false", "--trainer.load_optim_state=false"),
            "--trainer.hard_stop={value: 1, unit: steps}",
        ),
        ("exported/*",),
    ),
    Command(
        "run",
        ("train.yaml", "--trainer.save_folder=next", "--trainer.load_path=run/step00000012"),
        ("run/step00000012/*",),
    ),
    Command("olm_data", ("tokenize", "prose.jsonl", "--tokenizer", "tokenizer.json", "-o", "prose"),
            ("prose/*", "prose.jsonl", "tokenizer.json")),
]  # fmt: skip


@dataclass(frozen=True)
class Workplace:
    """A folder with what the product writes, made once; cases change copies of it.

    Attributes:
        folder: the honest one.
    """

    folder: Path

    @classmethod
    def make(cls, folder: Path, tokenizer: Path) -> Workplace:
        """Tokenise, mix, train, export; `folder` does not exist yet."""
        folder.mkdir()
        shutil.copy(tokenizer, folder / "tokenizer.json")
        lock = make_mixture(folder, tokenizer)
        (folder / "manifest.yaml").write_text(MANIFEST)
        (folder / "best.yaml").write_text(MANIFEST.replace("concat", "best_fit"))
        values = config_values(Path("mixture.lock.json"), Path("run"))
        values["trainer"]["takeover_seconds"] = 3
        values["trainer"]["callbacks"]["lm_evaluator"]["datasets"] = {"held": "held"}
        (folder / "train.yaml").write_text(yaml.safe_dump(values))
        here = cls(folder)
        for command in (
            Command("olm_data", ("mix", "best.yaml", "-o", "best.lock.json"), ()),
            Command("run", ("train.yaml",), ()),
            Command("export", ("run/step00000012", "--output", "exported"), ()),
        ):
            outcome = command.run(folder)
            assert outcome.code == 0, outcome.output
        for step in ("18", "24"):
            shutil.rmtree(folder / f"run/step000000{step}")
        shutil.copy(lock, folder / "manifest.lock.json")
        return here

    def kinds(self) -> list[str]:
        """Return the files, one of each kind, by their names in the workplace."""
        names = sorted(
            path.relative_to(self.folder).as_posix()
            for path in self.folder.rglob("*")
            if path.is_file()
        )
        left_out = ("code/*", "held/*", "*.jsonl", "run/step00000006/*", "out/*")
        names = [n for n in names if not any(fnmatch(n, pattern) for pattern in left_out)]
        return [*names, "run/metrics.jsonl", "run/starts.jsonl", "prose.jsonl"]

    def readers(self, name: str) -> list[Command]:
        """Return the commands that read a file."""
        return [c for c in COMMANDS if any(fnmatch(name, pattern) for pattern in c.reads)]

    def cases(self, seed: int, count: int, work: Path) -> Iterator[tuple[str, Path, Command]]:
        """Yield `count` changed copies with a command that reads the changed file."""
        choose, kinds = random.Random(seed), self.kinds()
        for number in range(count):
            name = choose.choice(kinds)
            readers = self.readers(name)
            place = work / f"case{number}"
            shutil.copytree(self.folder, place, symlinks=True)
            what = change(place, name, choose)
            if choose.random() < 0.8:
                make_good(place, name)
            yield f"{name}: {what}", place, choose.choice(readers)


def faults(place: Path, outcome: Outcome, honest: Outcome) -> list[str]:
    """Return what a command did that no file may make it do."""
    wrong = []
    if outcome.code not in CODES and "loss nan" not in outcome.output:  # how a run of such ends
        wrong.append(f"exit code {outcome.code}")
    if "Traceback (most recent" in outcome.output or "unexpected error" in outcome.output:
        wrong.append("a traceback")
    if (place / "canary").exists():
        wrong.append("CODE RAN")
    bad = [c for c in outcome.output if not (c.isprintable() or c in "\n\t\r")]
    if bad:
        wrong.append(f"raw {bad[0]!r} in the output")
    if outcome.cpu > honest.cpu + CPU_SECONDS:
        wrong.append(f"{outcome.cpu:.1f} s of CPU, {honest.cpu:.1f} s honest")
    if outcome.megabytes > honest.megabytes + MEGABYTES:
        wrong.append(f"{outcome.megabytes:.0f} MB, {honest.megabytes:.0f} MB honest")
    return wrong


def walk(honest: Workplace, work: Path, seed: int, cases: int) -> Iterator[str]:
    """Yield what goes wrong with `cases` changed copies."""
    usual: dict[Command, Outcome] = {}
    for what, place, command in honest.cases(seed, cases, work):
        if command not in usual:
            same = shutil.copytree(honest.folder, work / "same")
            usual[command] = command.run(same)
            assert usual[command].code == 0, usual[command].output
            shutil.rmtree(same)
        outcome = command.run(place)
        if wrong := faults(place, outcome, usual[command]):
            words = " ".join(command.words)
            yield f"{wrong} {what} | {command.module} {words}\n{outcome.output[-2000:]}"
        shutil.rmtree(place)


def main(mode: str, folder: str, *words: str) -> None:
    """Do one of these in this process.

    make FOLDER TOKENIZER: make the honest workplace.
    walk FOLDER WORK SEED CASES: print what goes wrong, as JSON, a line each.
    """
    torch.set_num_threads(1)  # so that it may be forked
    if mode == "make":
        Workplace.make(Path(folder), Path(words[0]))
    else:
        for found in walk(Workplace(Path(folder)), Path(words[0]), int(words[1]), int(words[2])):
            print(json.dumps(found))
