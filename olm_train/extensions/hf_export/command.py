"""The command that turns a checkpoint into a folder for others: `olm-train export`.

CHECKPOINT -> verified -> --to olm: model.safetensors + tokenizer, lock, configuration
                       -> --to hf: what transformers, vLLM, llama.cpp, MLX, ... read
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from olm_data.command import Command, say
from olm_data.commands.said import refuse_given
from olm_data.errors import InputError
from olm_data.extras import needs
from olm_data.printing import emit
from olm_data.regular_files import read_regular

with needs("exporting a model"):
    from olm_data.chat_template import MAX_TEMPLATE
    from olm_data.model_receipt import Dtype, Verify
    from olm_train.checkpoint.load import find_checkpoint
    from olm_train.checkpoint.portable import export
    from olm_train.distributed.world import World
    from olm_train.extensions.hf_export import export as hf
    from olm_train.extensions.hf_export.job import ExportOptions, parse_size

_OF_HF = ("dtype", "shard_size", "write_tied_head", "chat_template", "context", "verify")


@click.command(cls=Command)
@click.argument("checkpoint")
@click.option(
    "--to",
    "form",
    type=click.Choice(["olm", "hf"]),
    default="olm",
    show_default=True,
    help="olm: one file for this program; hf: a folder for transformers and its kin.",
)
@click.option(
    "--output",
    required=True,
    help="Folder; of olm also the file model.safetensors in it. Local or s3://.",
)
@click.option(
    "--dtype",
    type=click.Choice(list(get_args(Dtype))),
    default="bfloat16",
    show_default=True,
    help="hf: of the weights.",
)
@click.option(
    "--shard-size",
    metavar="SIZE",
    default="5GB",
    show_default=True,
    help="hf: bytes of weights in a file, at most.",
)
@click.option(
    "--write-tied-head",
    is_flag=True,
    help="hf: write a head that is the embedding table a second time.",
)
@click.option(
    "--chat-template", metavar="FILE", help="hf: Jinja template of conversations to put in."
)
@click.option(
    "--context",
    type=click.IntRange(1, 1 << 24),
    metavar="TOKENS",
    help="hf: of the longest text the model is for.  [default: of the mixture's rows]",
)
@click.option(
    "--verify",
    type=click.Choice(list(get_args(Verify))),
    default="auto",
    show_default=True,
    help="hf: who reads it before it is there; auto: what is installed.",
)
@click.option("--trust", is_flag=True, help="Import classes that the checkpoint names: I trust it.")
@click.option("--json", "as_json", is_flag=True, help="Print config.json or receipt, no sentence.")
def main(
    checkpoint: str,
    form: str,
    output: str,
    dtype: Dtype,
    shard_size: str,
    write_tied_head: bool,
    chat_template: str | None,
    context: int | None,
    verify: Verify,
    trust: bool,
    as_json: bool,
) -> None:
    """Write the weights of a checkpoint, or of a run's newest one, for other programs.

    \b
    olm-train export runs/first --to hf --output first-hf
    olm-train export runs/first --output model.safetensors
    olm-train export s3://bucket/run/step00001000 --to hf --dtype float32 --output s3://bucket/hf
    """
    options = ExportOptions(
        dtype=dtype,
        shard_bytes=parse_size(shard_size),
        tied_head=write_tied_head,
        template=_template(chat_template),
        context=context,
        check=verify,
    )
    if form == "olm":
        refuse_given(_OF_HF, "--to hf")
    found = find_checkpoint(checkpoint, World(), say)
    if form == "hf":
        result = hf.export(found, output, options, trust=trust)
        emit(result.receipt, as_json)
        say(f"{'already there' if result.already else 'written'}: {result.output}")
        return
    emit(export(found, output, trust=trust), as_json)


def _template(path: str | None) -> str | None:
    """Return the text of a chat template.

    Raises:
        InputError: there is no such file, or it is no text.
    """
    if path is None:
        return None
    try:
        return read_regular(Path(path), MAX_TEMPLATE).decode()
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise InputError("there is no such template", where=f"--chat-template {path}") from error
