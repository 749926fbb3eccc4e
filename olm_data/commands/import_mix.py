"""`olm-data import-mix`: options and what is printed."""

from __future__ import annotations

import json
import os
import shlex

import click


@click.command("import-mix")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--sequence-length", type=click.IntRange(1), default=2048, show_default=True)
@click.option("--tokens", help="Of the run, such as 100B, where the file does not say.")
@click.option("--data", default="./tokens", show_default=True, help="Folder of the datasets.")
@click.option("--output", default="manifest.yaml", show_default=True, help="Manifest to write.")
@click.option("--dry-run", is_flag=True, help="Print the manifest and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print what was read as JSON.")
def import_mix(
    file: str,
    sequence_length: int,
    tokens: str | None,
    data: str,
    output: str,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Make a manifest of an OLMo-core source mixture or a Megatron blend list.

    \b
    olm-data import-mix source_mixture.yaml --tokens 100B
    olm-data import-mix blend.txt --tokens 100B --data s3://bucket/tokens --dry-run
    """
    from olm_data.counts import parse_count
    from olm_data.errors import ConflictError, InputError, printable
    from olm_data.mixture.import_mixture import manifest_text, read_mixture_file

    try:
        with open(file, "rb") as opened:
            raw = opened.read()
    except OSError as error:
        raise InputError(
            f"cannot read the file: {error.strerror}", where=file, fix="check the path"
        ) from None
    found = read_mixture_file(raw, file)
    text = manifest_text(
        found,
        origin=os.path.basename(file),
        sequence_length=sequence_length,
        tokens=parse_count(tokens, "--tokens") if tokens else None,
        data=data,
    )
    if as_json:
        sources = [
            {
                "name": source.name,
                "weight": None if source.weight is None else str(source.weight),
                "max_epochs": None if source.max_epochs is None else str(source.max_epochs),
                "paths": list(source.paths),
            }
            for source in found.sources
        ]
        click.echo(json.dumps({"output": output, "sources": sources, "manifest": text}, indent=1))
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
        click.echo(f"wrote {output}: {len(found.sources):,} sources", err=True)
    first = found.sources[0]
    paths = " ".join(shlex.quote(printable(path)) for path in first.paths[:2])
    click.echo(
        f"next, for each source: olm-data import {paths}{' ...' if len(first.paths) > 2 else ''} "
        f"--tokenizer TOKENIZER --output {data.rstrip('/')}/{first.name}",
        err=True,
    )
