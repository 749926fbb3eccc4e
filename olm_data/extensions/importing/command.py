"""`olm-data import`: options and what is printed."""

from __future__ import annotations

import os
import shlex
from fractions import Fraction
from functools import partial
from typing import Any

import click

from olm_data.command import CountParam
from olm_data.commands.said import note, refuse_given, show_progress, show_read, warn
from olm_data.counts import counted, parse_count
from olm_data.errors import ConflictError, InputError, UsageError, printable, typed
from olm_data.printing import emit, print_json

SHOWN = 20
MIXTURES = (".yaml", ".yml", ".json", ".txt")


@click.command("import")
@click.argument("inputs", nargs=-1, required=True, metavar="FILE|PREFIX|DIR...|MIXTURE")
@click.option("--tokenizer", help="tokenizer.json, a folder with one, or a hub id.")
@click.option("--output", help="Folder or URL of the dataset; of a MIXTURE the manifest to write.")
@click.option(
    "--dtype",
    type=click.Choice(["uint16", "uint32"]),
    help="Dtype of the tokens, where the files do not record it.",
)
@click.option(
    "--eos", default="auto", show_default=True, help="Token after each document, or none."
)
@click.option("--bos", default="none", show_default=True, help="Token before each document.")
@click.option(
    "--strict-inputs", is_flag=True, help="Refuse if a file of the folders would not be imported."
)
@click.option("--tokens", help="MIXTURE: of the run, such as 100B, where the file does not say.")
@click.option(
    "--sequence-length", type=CountParam(1), default=2048, show_default=True, help="MIXTURE."
)
@click.option(
    "--data", default="./tokens", show_default=True, help="MIXTURE: folder of the datasets."
)
@click.option("--dry-run", is_flag=True, help="Check the files; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def import_(
    inputs: tuple[str, ...],
    tokenizer: str | None,
    output: str | None,
    dtype: str | None,
    eos: str,
    bos: str,
    strict_inputs: bool,
    dry_run: bool,
    as_json: bool,
    **mixed: Any,
) -> None:
    """Make a dataset of the token files of dolma, OLMo-core, Megatron or datatrove, in place.

    Of a file with a source mixture of OLMo-core or a blend list of Megatron it makes a manifest,
    and prints the commands that make the datasets of it.

    \b
    olm-data import tokens/part-*.npy --dtype uint16 --tokenizer gpt2 --output ./tokens/web
    olm-data import data_text_document --tokenizer ./my-tokenizer --output ./tokens/web
    olm-data import s3://bucket/dolma --dtype uint32 --tokenizer dolma2 --output s3://bucket/dolma
    olm-data import source_mixture.yaml --tokens 100B --output manifest.yaml
    olm-data import blend.txt --tokens 100B --data s3://bucket/tokens --dry-run
    """
    if _is_mixture(inputs):
        refuse_given(("eos", "bos", "strict_inputs"), "token files, and this is a mixture")
        mixed |= {"output": output or "manifest.yaml", "tokenizer": tokenizer, "dtype": dtype}
        _import_mixture(inputs[0], dry_run=dry_run, as_json=as_json, **mixed)
        return
    refuse_given(("tokens", "sequence_length", "data"), "mixtures, and these are token files")
    if tokenizer is None or output is None:
        raise UsageError(
            "--tokenizer and --output are needed",
            fix="olm-data import FILES --tokenizer TOKENIZER --output ./tokens/web",
        )
    from olm_data.extensions.importing.import_files import import_files
    from olm_data.tokenizer.tokenizer import load_tokenizer

    spec = load_tokenizer(tokenizer, eos=eos, bos=bos)
    with show_progress("import") as progress:
        watch = partial(show_read, progress)
        how: dict[str, Any] = {"dtype": dtype, "dry_run": dry_run, "strict_inputs": strict_inputs}
        done = import_files(inputs, output, spec, watch=watch, **how)
    emit(done, as_json)
    if not (dry_run or as_json):
        note(f"next: olm-data verify {typed(output)}")


def _is_mixture(inputs: tuple[str, ...]) -> bool:
    """Whether a file is named that says how to mix, and no token files: by its name alone."""
    suffix = os.path.splitext(inputs[0])[1]
    named = suffix in MIXTURES or (not suffix and os.path.isfile(inputs[0]))
    paired = os.path.exists(f"{inputs[0]}.bin")  # a Megatron prefix
    return len(inputs) == 1 and named and not paired and not os.path.isdir(inputs[0])


def _import_mixture(
    file: str,
    *,
    sequence_length: int,
    tokens: str | None,
    data: str,
    output: str,
    dry_run: bool,
    as_json: bool,
    **said: str | None,
) -> None:
    """Write the manifest of another project's mixture; print the commands that make its datasets.

    Args:
        file: OLMo-core's source mixture, or Megatron's blend list.
        sequence_length: of the manifest.
        tokens: of the run, where the file does not say.
        data: folder of the datasets.
        output: the manifest.
        dry_run: print what would be written.
        as_json: for programs.
        said: tokenizer and dtype of the files, None: put in by hand.
    """
    from olm_data.extensions.importing import mixtures
    from olm_data.path_kinds import nearest
    from olm_data.regular_files import MAX_SMALL, read_regular
    from olm_data.storage.output_paths import refuse_output

    refuse_output(output, "--output", "local file")
    try:
        raw = read_regular(file, MAX_SMALL)
    except OSError as error:
        what, fix = f"cannot read the file: {error.strerror}", nearest(file, "check the path")
        raise InputError(what, where=file, fix=fix) from None
    found = mixtures.read_mixture_file(raw, file)
    text = mixtures.manifest_text(
        found,
        origin=os.path.basename(file),
        sequence_length=sequence_length,
        tokens=parse_count(tokens, "--tokens") if tokens else None,
        data=data,
        folder=os.path.dirname(output),
    )
    commands = [
        mixtures.import_command(source, data=data, output=output, **said)
        for source in found.sources
    ]
    pairs = list(zip(found.sources, commands, strict=True))
    if as_json:
        sources = [
            {
                "name": source.name,
                "weight": _spelt(source.weight),
                "max_epochs": _spelt(source.max_epochs),
                "paths": list(source.paths),
                "command": command,
            }
            for source, command in pairs
        ]
        print_json({"output": output, "sources": sources, "manifest": text})
    elif dry_run:
        click.echo(text, nl=False)
    if not dry_run:
        try:
            with open(output, "x", encoding="utf-8") as opened_output:
                opened_output.write(text)
        except FileExistsError:
            fix = "choose another --output, or remove it"
            raise ConflictError("a file is here already", where=output, fix=fix) from None
        note(f"wrote {output}: {counted(len(found.sources), 'source')}")
    for source, command in pairs:
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
    for option, value in said.items():
        if value is None and any(f" {option.upper()} " in command for command in runnable):
            note(f"      put the files' own for {option.upper()}, or say --{option}")
    note(f"then: olm-data mix {shlex.quote(printable(output))}")


def _spelt(number: Fraction | None) -> str | None:
    return None if number is None else str(number)
