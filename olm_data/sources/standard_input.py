"""Standard input as an input: `-` is kept in a file of this machine until the command ends.

    bytes -> TMPDIR/olm-staging-.../stdin-<sha256, 12 digits>.<format> -> read as any file is

A pipe can be read once, but text is read twice or more (a sample to prove the encoder, then all of
it; again after an interruption). The file is named by its content and has no time of its own, so
the same text piped again makes the same plan: finished shards are kept. A killed command's file is
removed by the next one.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from olm_data.errors import InputError, UsageError, suggest
from olm_data.sources.formats import FORMATS, format_of
from olm_data.sources.readers import CHAT
from olm_data.storage.disk import abandoned, io_errors, scratch

STANDARD_INPUT = "-"
DEFAULT_FORMAT = "jsonl"
_PIECE = 4 << 20


@contextmanager
def spooled(
    inputs: Sequence[str], form: str | None, runner: str, say: Callable[[str], None]
) -> Iterator[tuple[str, ...]]:
    """Yield the inputs with the file of standard input in the place of `-`.

    Args:
        form: format of standard input, as the ending of a file's name; None for JSON Lines.
        runner: where tasks run; on other machines they could not read the file.
        say: told where the text is kept.

    Raises:
        UsageError: a format without standard input or an unknown one, a terminal, other inputs
            beside it, or tasks on other machines.
        InputError: standard input holds nothing.
        ResourceError: there is no room for it.
    """
    if STANDARD_INPUT not in inputs:
        if form not in (None, CHAT):
            raise UsageError(
                "--format is for standard input, or chat",
                fix="olm-data tokenize - --format txt",
            )
        yield tuple(inputs)
        return
    form = (DEFAULT_FORMAT if form in (None, CHAT) else str(form)).lstrip(".").lower()
    if format_of(f"stdin.{form}") is None:
        known = [ending.lstrip(".") for ending in FORMATS]
        raise UsageError(f"--format {form!r} is not known", fix=suggest(form, known))
    if len(inputs) > 1 or runner != "local":
        raise UsageError(
            "standard input is an input by itself, for this machine",
            where=f"--runner {runner}" if runner != "local" else " ".join(inputs),
            fix="write it to a file that all machines see, and name that",
        )
    if sys.stdin.isatty():
        raise UsageError(
            "standard input is a terminal", fix="zcat text.jsonl.gz | olm-data tokenize - ..."
        )
    abandoned(remove=True)
    with scratch() as folder:
        size, digest, path = 0, hashlib.sha256(), folder / "stdin"
        with io_errors(str(folder), writing=True):
            with open(path, "wb") as file:
                while piece := sys.stdin.buffer.read(_PIECE):
                    digest.update(piece)
                    size += file.write(piece)
            if not size:
                raise InputError("standard input holds nothing", where="-")
            name = folder / f"stdin-{digest.hexdigest()[:12]}.{form}"
            path.rename(name)
            time = int(digest.hexdigest()[:12], 16)  # of its content, as its name is
            os.utime(name, ns=(time, time))
            os.chmod(name, stat.S_IRUSR)
        say(f"standard input: {size:,} bytes, kept in {folder} until this command ends")
        yield (str(name),)
