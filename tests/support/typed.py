"""Checks commands that a page tells readers to type and that cannot be run here: options, values.

    block of a page -> simple commands -> the parser of the program they name -> mistakes

Looked at: olm-data, `python -m olm_train...`, torchrun, and the extras and targets that
`pip install` and `make` name. Files need not exist; a shell variable stands for 1. Other programs
are passed over.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator

import click
from support.pages import REPOSITORY

from olm_data.cli import cli
from olm_data.config.values import Values
from olm_data.errors import OlmError
from olm_train.cli import cli as trainer
from olm_train.run.command import Arguments

OPERATORS = re.compile(r"[();|&]+")
VARIABLE = re.compile(r"\$\{[^}]*\}|\$\([^)]*\)|\$\w+")


def mistakes(script: str) -> list[str]:
    """Return what is wrong with a shell script, one line a mistake."""
    syntax = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    if syntax.returncode:
        return [syntax.stderr.strip()]
    return [
        f"{shlex.join(command)}: {wrong}"
        for command in simple_commands(script)
        if (wrong := _mistake(command))
    ]


def simple_commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each simple command; of here-documents only those that become scripts."""
    lines = iter(script.replace("\\\n", " ").splitlines())
    for line in lines:
        here = re.search(r"<<-?\s*['\"]?(\w+)", line)
        if here:
            body = []
            for inner in lines:
                if inner.strip() == here[1]:
                    break
                body.append(inner)
            if re.search(r"\.(sh|sbatch|slurm)\b|\bsbatch\b", line):
                yield from simple_commands("\n".join(body))
            continue
        lexer = shlex.shlex(VARIABLE.sub("1", line), posix=True, punctuation_chars="();|&")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quotation over several lines: no command of ours needs one
            continue
        command: list[str] = []
        for word in [*words, ";"]:
            if OPERATORS.fullmatch(word):
                if command:
                    yield command
                command = []
            else:
                command.append(word)


def _mistake(command: list[str]) -> str | None:
    """Return what is wrong with one command, looking behind wrappers such as `srun`; or None."""
    for place, word in enumerate(command):
        rest = command[place + 1 :]
        if word == "olm-data":
            return _click(cli, rest)
        if word == "olm-train":
            return _trainer(rest)
        if word == "torchrun":
            return _torchrun(rest)
        if word == "-m" and rest and rest[0].startswith("olm_train"):
            return _module(rest[0], rest[1:])
        if word == "pip":
            return _extras(rest)
        if word == "make":
            return _targets(rest)
    return None


def _click(command: click.Command, words: list[str]) -> str | None:
    """Parse as click does, without asking whether files exist, and call nothing."""
    context = click.Context(command, info_name=command.name)
    if isinstance(command, click.Group):
        command.parse_args(context, list(words))
        rest = [*context._protected_args, *context.args]
        name = rest[0] if rest else ""
        found = command.get_command(context, name)
        return _click(found, rest[1:]) if found else f"no command {name}"
    try:
        given, _, seen = command.make_parser(context).parse_args(list(words))
        for parameter in seen:
            value = given[parameter.name or ""]
            one = parameter.nargs == 1 and not parameter.multiple and isinstance(value, str)
            if one and not isinstance(parameter.type, (click.Path, click.File)):
                parameter.type.convert(value, parameter, context)
    except click.ClickException as error:
        return error.format_message()
    for parameter in command.params:
        value = given.get(parameter.name or "")
        if parameter.required and not (isinstance(value, (str, tuple, list)) and value):
            return f"without {parameter.name}"
    return None


def _torchrun(words: list[str]) -> str | None:
    from torch.distributed.run import get_args_parser

    try:
        parsed = get_args_parser().parse_args(words)
    except SystemExit:
        return "torchrun does not take these options"
    if not parsed.module:
        return None
    return _module(parsed.training_script, parsed.training_script_args)


def _trainer(words: list[str]) -> str | None:
    if words[:1] and words[0] in ("run", "config"):
        return _module("olm_train.run", words[1:])
    return _click(trainer, words)


def _module(name: str, words: list[str]) -> str | None:
    if name != "olm_train.run":
        return f"no module {name}"
    known = config_names()
    values = Values({})
    try:
        arguments = Arguments.split(words)
        for option in arguments.overrides:
            values.override(option)
    except OlmError as error:
        return str(error)
    fields = [option[2:].partition("=")[0] for option in arguments.overrides]
    unknown = [field for field in fields if not _known(field, known)]
    return f"no field {unknown[0]}" if unknown else None


def config_names() -> set[str]:
    """The fields of a training configuration, from the reference page, which a test keeps whole."""
    page = (REPOSITORY / "docs" / "reference" / "train-config.md").read_text()
    return set(re.findall(r"`([a-z_0-9]+(?:\.[a-z_0-9]+)*)`", page))


def _known(field: str, known: set[str]) -> bool:
    """Whether it is a field, the beginning of one, or a key of a mapping of names."""
    beginning = any(name.startswith(f"{field}.") for name in known)
    return field in known or beginning or field.rpartition(".")[0].endswith(".datasets")


def _extras(words: list[str]) -> str | None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for word in words:
        if found := re.fullmatch(r"(?:\.|([\w-]+))\[([\w,]+)\]", word):
            if found[1] not in (None, project["name"]):
                return f"{found[1]} is another project's name"
            unknown = set(found[2].split(",")) - set(project["optional-dependencies"])
            if unknown:
                return f"no extra {sorted(unknown)[0]}"
    return None


def _targets(words: list[str]) -> str | None:
    targets = re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    named = [word for word in words if re.fullmatch(r"[a-z]+", word)]
    unknown = [word for word in named if word not in targets]
    return f"no target {unknown[0]}" if unknown else None
