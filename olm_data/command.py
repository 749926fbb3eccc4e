"""What both command lines share: groups of commands, and how a program starts, fails and ends.

run_process -> run_program: streams secured -> command -> error as a message and an exit code
    -> streams flushed -> threads joined, exit functions -> gone with the code
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click

import olm_data
from olm_data import plugins
from olm_data.counts import parse_count
from olm_data.errors import OlmError, UsageError, printable, shown, suggest
from olm_data.extras import missing_extra
from olm_data.redaction import hold_typed, redacted
from olm_data.sinks import OutputLost, drop_results, guard, print_traceback, secure_streams


def version_option(program: str) -> Callable[[Any], Any]:
    """Return `--version`: of the program, torch if it is there, and the commit of a checkout."""

    def tell(context: click.Context, _: click.Parameter, asked: bool) -> None:
        if not asked or context.resilient_parsing:
            return
        import subprocess
        from importlib.metadata import PackageNotFoundError, version  # a third of each start

        said = [f"{program}, version {olm_data.__version__}"]
        with suppress(PackageNotFoundError):
            said.append(f"torch {version('torch')}")
        root = Path(olm_data.__file__).parents[1]
        if (root / ".git").exists():
            words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
            with suppress(OSError):
                git = subprocess.run(words, capture_output=True, text=True, check=False)
                said += [f"git {git.stdout.strip()}"] * (git.returncode == 0)
        click.echo(", ".join(said))
        context.exit()

    return click.option(
        "--version", is_flag=True, expose_value=False, is_eager=True, callback=tell,
        help="Show the version, torch's and the commit, and exit.",
    )  # fmt: skip


def usage_error(error: click.ClickException, program: str) -> UsageError:
    """Return what click refuses in our style.

    Args:
        program: and the command, where click does not say which one it was.
    """
    context = error.ctx if isinstance(error, click.UsageError) else None
    path = context.command_path if context else program
    text = error.format_message().strip()
    sentence = text[:1].lower() + text[1:].removesuffix(".")
    sentence = re.sub(r"(?<=is not a valid )(integer|float) range", r"\1", sentence)
    return UsageError(sentence, fix=f"{path} --help")


def for_people(error: Exception, what: str = "this") -> Exception:
    """Return an error of the machine, or of what is installed, as one with a message.

    Args:
        what: what cannot be done where a package is not installed.
    """
    if isinstance(error, ImportError):
        return missing_extra(error, what)
    if isinstance(error, OSError | MemoryError) and not isinstance(error, OlmError):
        from olm_data.storage.disk import of_machine

        return of_machine(error)
    return error


@contextmanager
def reported(*, debug: bool, as_json: bool = False) -> Iterator[None]:
    """Turn an error of the body that a user can act on into a message and an exit code.

    Args:
        debug: show the traceback instead.
        as_json: an error is also a line on standard output:
            `{"event": "error", "exit_code": ...}`.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OutputLost):
            drop_results()
        known = for_people(error)
        if not isinstance(known, OlmError):  # a defect: Python prints it, and events tell it, too
            _error_event(as_json, 1, f"{type(error).__name__}: {error}")
            raise
        parts = {"where": known.where, "why": known.why, "fix": known.fix}
        _error_event(as_json, known.exit_code, known.what, **parts)
        if debug:
            print_traceback(type(error), error, error.__traceback__)
        else:
            print(f"error: {shown(str(known))}", file=sys.stderr, flush=True)
        raise SystemExit(known.exit_code) from None


def _error_event(as_json: bool, exit_code: int, what: str, **parts: str | None) -> None:
    if as_json:
        from olm_data.progress import write_event

        write_event(sys.stdout, "error", exit_code=exit_code, what=redacted(what), **parts)


QUIET = "olm_data.quiet"


def quiet() -> bool:
    """Return whether the running command was asked to say no more than its result."""
    context = click.get_current_context(silent=True)
    return bool(context and context.meta.get(QUIET))


def say(text: object) -> None:
    """Print a remark to standard error; with `-q` no sentences but warnings."""
    if not (quiet() and isinstance(text, str) and not text.startswith("warning: ")):
        click.echo(shown(str(text)), err=True)


class CountParam(click.IntRange):
    """A whole number of an option, also as people write it: `32K`, `1.5M`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        with suppress(UsageError):  # click says what is wrong with a text that is none
            value = parse_count(value)
        return super().convert(value, param, ctx)


def _be_quiet(context: click.Context, _: click.Parameter, given: bool) -> None:
    if given:
        context.meta[QUIET] = True


def _be_verbose(context: click.Context, _: click.Parameter, given: bool) -> None:
    if not given:
        return
    if context.meta.get(QUIET):
        raise click.UsageError("-q and -v contradict each other", context)
    start = time.monotonic()
    handler = logging.StreamHandler()
    handler.setFormatter(_Elapsed(start))
    log = logging.getLogger("olm_data")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)

    def end() -> None:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
        own, children = (resource.getrusage(who) for who in _WHO)
        cpu = sum(use.ru_utime + use.ru_stime for use in (own, children))
        most = max(own.ru_maxrss, children.ru_maxrss) / 1024
        seconds = time.monotonic() - start
        click.echo(f"took {seconds:.1f} s, {cpu:.1f} s of CPU, {most:,.0f} MiB at most", err=True)

    context.call_on_close(end)


_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


class _Elapsed(logging.Formatter):
    def __init__(self, start: float) -> None:
        super().__init__()
        self._start = start

    def format(self, record: logging.LogRecord) -> str:
        return f"{time.monotonic() - self._start:8.2f} s  {shown(record.getMessage())}"


def _flag(*names: str, help: str, then: Callable[..., None] | None = None) -> click.Option:
    return click.Option(
        names, is_flag=True, expose_value=False, is_eager=True, help=help, callback=then
    )


def with_common_options(command: click.Command, *more: click.Option) -> click.Command:
    """Add what every command takes: -q, -v, --debug, `more`, and -o for its --output."""
    if isinstance(command, click.Group):
        for one in command.commands.values():
            with_common_options(one, *more)
    for parameter in command.params:
        if "--output" in parameter.opts and "-o" not in parameter.opts:
            parameter.opts.insert(0, "-o")
    options = [
        _flag("-q", "--quiet", help="Print only the result and warnings.", then=_be_quiet),
        _flag("-v", "--verbose", help="Print each step and what it took.", then=_be_verbose),
        _flag("--debug", help="Show the traceback of an error."),  # read in `run_program`
        *more,
    ]
    given = {parameter.name for parameter in command.params}  # named before in this process
    command.params += [option for option in options if option.name not in given]
    return command


class Command(click.Command):
    """A command that can be called without its group: it reports its errors, and takes --debug."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.context_settings["help_option_names"] = ["-h", "--help"]
        debug = click.Option(["--debug"], is_flag=True, help="Show the traceback of an error.")
        self.params.append(debug)
        with_common_options(self)

    def invoke(self, ctx: click.Context) -> Any:
        with reported(debug=ctx.params.pop("debug")):
            return super().invoke(ctx)


class CommandGroup(click.Group):
    """A group of commands that answers an unknown name with the nearest one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            near = self.nearest(args[0], self.list_commands(ctx))
            near += "" if near.endswith("?") else ";"
            raise UsageError(
                f"there is no command {printable(args[0])!r}",
                fix=f"{near} {ctx.command_path} --help lists them",
            )
        return super().resolve_command(ctx, args)

    def nearest(self, name: str, known: list[str]) -> str:
        """Return a sentence that names the command that is probably meant."""
        return suggest(name, known)


class Program(CommandGroup):
    """The commands of a program, those of extensions among them, each imported when it is named."""

    core: Mapping[str, Mapping[str, str]]
    """Summaries of the core's commands, by heading."""
    extensions: str
    """Entry points of the others. The package of such a command says in `COMMANDS` what heading and
    summary it has."""
    internal: Collection[str] = ()
    """Commands that programs type; --help leaves them out."""
    interrupted = "interrupted"
    """What is said after Ctrl-C."""

    def core_command(self, name: str) -> click.Command:
        """Import a command of the core."""
        raise NotImplementedError

    def summaries(self) -> dict[str, dict[str, str]]:
        """Return the summary of each command, by heading."""
        found = {heading: dict(known) for heading, known in self.core.items()}
        for name in plugins.names(self.extensions):
            module = str(plugins.path_of(self.extensions, name)).partition(":")[0]
            about = getattr(import_module(module.rpartition(".")[0] or module), "COMMANDS", {})
            heading, summary = about.get(name, ("Other packages", ""))
            found.setdefault(heading, {})[name] = summary
        return found

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for known in self.summaries().values() for name in known]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if any(cmd_name in known for known in self.core.values()):
            return self.core_command(cmd_name)
        if plugins.path_of(self.extensions, cmd_name) is None:
            return None
        return with_common_options(plugins.load(self.extensions, cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, known in self.summaries().items():
            if not known:  # its commands are extensions that are not there
                continue
            with formatter.section(heading):
                formatter.write_dl([item for item in known.items() if item[0] not in self.internal])


def run_program(group: Program, program: str, *words: str) -> NoReturn:
    """Run the command that is typed; exit with its code, or that of its error.

    Args:
        program: name of the group as it is typed.
        words: what stands before the words of the command line.

    Raises:
        SystemExit: always.
    """
    guard()
    arguments = [*words, *sys.argv[1:]]
    as_json = "--json" in arguments
    hold_typed(arguments)
    with reported(debug="--debug" in arguments, as_json=as_json):
        secure_streams()
        _refuse_memory(arguments)
        try:
            # what a command gave to ctx.exit, or returned
            code = group.main(arguments, program, standalone_mode=False)
        except SystemExit as end:
            code = end.code
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = UsageError.exit_code
        except click.ClickException as error:
            known = group.list_commands(click.Context(group))
            named = [word for word in arguments if word in known][:1]
            raise usage_error(error, " ".join((program, *named))) from None
        except (KeyboardInterrupt, click.Abort):
            code = 130
            _error_event(as_json, code, "interrupted")
            click.echo(group.interrupted, err=True)
        sys.stdout.flush()
    sys.exit(code or 0)


def _refuse_memory(arguments: list[str]) -> None:
    for word in arguments:
        if word.startswith("memory://") or "=memory://" in word:
            raise UsageError(
                "memory:// is what one process holds, and a command ends: nothing stays there",
                where=word,
                fix="name a folder or a bucket; memory:// is for a script that calls olm_data",
            )


def run_process(program: Callable[[], object]) -> None:
    """Run a program as all that this process does, and end the process with its exit code.

    The interpreter is not taken apart first: that takes 0.1 s for nothing, and a thread of torch
    that still drops the tensors of a last collective would abort the process (SIGABRT). What must
    be on the disk is there before. An uncaught error ends as Python ends it.
    """
    codes: list[int] = []
    atexit.register(_leave, codes)  # registered first: it runs after the exit functions of others
    try:
        program()
    except SystemExit as end:
        codes.append(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


def _leave(codes: list[int]) -> None:
    if not codes:
        return
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # Python says what is wrong, and with which exit code
            return
    os._exit(codes[0])
