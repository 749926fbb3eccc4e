"""What `olm-data import` does with a file that says how to mix: it writes a manifest."""

from __future__ import annotations

import os
import shlex

import click

from olm_data.commands.said import note, warn
from olm_data.counts import counted
from olm_data.printing import print_json

SHOWN = 20
MANIFEST = "manifest.yaml"


def import_mixture(
    file: str,
    *,
    sequence_length: int,
    tokens: str | None,
    data: str,
    output: str,
    tokenizer: str | None,
    dtype: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write the manifest of another project's mixture; print the commands that make its datasets.

    Raises:
        UsageError: the file is no mixture, or a value of it has no meaning here.
        InputError: it cannot be read.
        ConflictError: a file is at the output already.
    """
    from olm_data.counts import parse_count
    from olm_data.errors import ConflictError, InputError, printable
    from olm_data.extensions.importing.mixtures import (
        import_command,
        manifest_text,
        read_mixture_file,
    )
    from olm_data.path_kinds import nearest
    from olm_data.regular_files import MAX_SMALL, read_regular
    from olm_data.storage.output_paths import refuse_output

    refuse_output(output, "--output", "local file")
    try:
        raw = read_regular(file, MAX_SMALL)
    except OSError as error:
        raise InputError(
            f"cannot read the file: {error.strerror}",
            where=file,
            fix=nearest(file, "check the path"),
        ) from None
    found = read_mixture_file(raw, file)
    text = manifest_text(
        found,
        origin=os.path.basename(file),
        sequence_length=sequence_length,
        tokens=parse_count(tokens, "--tokens") if tokens else None,
        data=data,
        folder=os.path.dirname(output),
    )
    commands = [
        import_command(source, data=data, output=output, tokenizer=tokenizer, dtype=dtype)
        for source in found.sources
    ]
    if as_json:
        sources = [
            {
                "name": source.name,
                "weight": None if source.weight is None else str(source.weight),
                "max_epochs": None if source.max_epochs is None else str(source.max_epochs),
                "paths": list(source.paths),
                "command": command,
            }
            for source, command in zip(found.sources, commands, strict=True)
        ]
        print_json({"output": output, "sources": sources, "manifest": text})
    elif dry_run:
        click.echo(text, nl=False)
    if not dry_run:
        try:
            with open(output, "x", encoding="utf-8") as opened_output:
                opened_output.write(text)
        except FileExistsError:
            raise ConflictError(
                "a file is here already", where=output, fix="choose another --output, or remove it"
            ) from None
        note(f"wrote {output}: {counted(len(found.sources), 'source')}")
    for source, command in zip(found.sources, commands, strict=True):
        if command is None:
            warn(
                f"source {source.name}: olm-data import does not take "
                f"{printable(source.paths[0])}; copy its files to a folder or s3://BUCKET/PREFIX "
                "and import that"
            )
    runnable = [command for command in commands if command is not None]
    for command in runnable[:SHOWN]:
        note(f"next: {printable(command)}")
    if len(runnable) > SHOWN:
        note(f"and {len(runnable) - SHOWN:,} more such commands: --json --dry-run lists them all")
    for word, option in (("TOKENIZER", tokenizer), ("DTYPE", dtype)):
        if option is None and any(f" {word} " in command for command in runnable):
            note(f"      put the files' own for {word}, or say --{word.lower()}")
    note(f"then: olm-data mix {shlex.quote(printable(output))}")
