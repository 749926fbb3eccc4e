"""`olm-data import`: options and what is printed."""

from __future__ import annotations

import json

import click

from olm_data.commands.said import note, show_progress
from olm_data.errors import typed


@click.command("import")
@click.argument("inputs", nargs=-1, required=True, metavar="FILE|PREFIX|DIR...")
@click.option("--tokenizer", required=True, help="tokenizer.json, a folder with one, or a hub id.")
@click.option("--output", required=True, help="Folder of the dataset, or s3://bucket/prefix.")
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
@click.option("--dry-run", is_flag=True, help="Check the files; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def import_(
    inputs: tuple[str, ...],
    tokenizer: str,
    output: str,
    dtype: str | None,
    eos: str,
    bos: str,
    strict_inputs: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Make a dataset of the token files of dolma, OLMo-core, Megatron or datatrove, in place.

    \b
    olm-data import tokens/part-*.npy --dtype uint16 --tokenizer gpt2 --output ./tokens/web
    olm-data import data_text_document --tokenizer ./my-tokenizer --output ./tokens/web
    olm-data import s3://bucket/dolma --dtype uint32 --tokenizer dolma2 --output s3://bucket/dolma
    """
    from olm_data.importing.run import import_files
    from olm_data.tokenizer.tokenizer import load_tokenizer

    spec = load_tokenizer(tokenizer, eos=eos, bos=bos)
    with show_progress("import") as progress:
        done = import_files(
            inputs,
            output,
            spec,
            dtype=dtype,
            dry_run=dry_run,
            strict_inputs=strict_inputs,
            watch=lambda read, total: progress.update(
                read / max(total, 1),
                [
                    f"{read / max(progress.seconds, 1e-9) / 1e6:,.0f} MB/s",
                    f"{read / 1e9:,.2f} of {total / 1e9:,.2f} GB",
                ],
            ),
        )
    for remark in done.notes:
        note(f"note: {remark}")
    if as_json:
        click.echo(json.dumps(done.to_json(), indent=1))
        return
    click.echo("\n".join(done.lines()))
    if not dry_run:
        note(f"next: olm-data verify {typed(output)}")
