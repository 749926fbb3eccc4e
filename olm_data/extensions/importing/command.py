"""`olm-data import`: options and what is printed."""

from __future__ import annotations

import os
from functools import partial

import click

from olm_data.command import Count
from olm_data.commands.said import note, refuse_given, show_progress, show_read
from olm_data.errors import UsageError, typed
from olm_data.extensions.importing.command_mixture import MANIFEST, import_mixture
from olm_data.printing import emit

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
@click.option("--sequence-length", type=Count(1), default=2048, show_default=True, help="MIXTURE.")
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
    tokens: str | None,
    sequence_length: int,
    data: str,
    dry_run: bool,
    as_json: bool,
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
        import_mixture(
            inputs[0],
            sequence_length=sequence_length,
            tokens=tokens,
            data=data,
            output=output or MANIFEST,
            tokenizer=tokenizer,
            dtype=dtype,
            dry_run=dry_run,
            as_json=as_json,
        )
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
        done = import_files(
            inputs,
            output,
            spec,
            dtype=dtype,
            dry_run=dry_run,
            strict_inputs=strict_inputs,
            watch=partial(show_read, progress),
        )
    for remark in done.notes:
        note(f"note: {remark}")
    emit(done, as_json)
    if not (dry_run or as_json):
        note(f"next: olm-data verify {typed(output)}")


def _is_mixture(inputs: tuple[str, ...]) -> bool:
    """Whether a file is named that says how to mix, and no token files: by its name alone."""
    suffix = os.path.splitext(inputs[0])[1]
    named = suffix in MIXTURES or (not suffix and os.path.isfile(inputs[0]))
    paired = os.path.exists(f"{inputs[0]}.bin")  # a Megatron prefix
    return len(inputs) == 1 and named and not paired and not os.path.isdir(inputs[0])
