"""The command that turns a checkpoint into one safetensors file: `olm-train export`.

CHECKPOINT -> verified -> model.safetensors + tokenizer, lock, configuration + config.json
"""

from __future__ import annotations

import json

import click

from olm_data.command import reported
from olm_data.errors import shown
from olm_data.extras import needs

with needs("exporting a model"):
    from olm_train.checkpoint.exported import export
    from olm_train.checkpoint.load import find_checkpoint
    from olm_train.distributed.world import World


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("checkpoint")
@click.option(
    "--output",
    required=True,
    help="model.safetensors, or a folder for it; local or s3://. The rest goes beside it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print config.json instead of a sentence.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(checkpoint: str, output: str, as_json: bool, debug: bool) -> None:
    """Write the weights of a checkpoint, or of a run's newest one, as one safetensors file.

    \b
    olm-train export runs/first --output model.safetensors
    olm-train export s3://bucket/run/step00001000 --output exported/
    """
    with reported(debug=debug):
        found = find_checkpoint(
            checkpoint, World(), lambda error: click.echo(shown(str(error)), err=True)
        )
        about = export(found, output)
    if as_json:
        click.echo(json.dumps(about))
    else:
        weights = about["weights"]
        click.echo(
            f"{weights['file']}: {about['parameters']:,} parameters of step {about['step']:,}, "
            f"{weights['bytes']:,} bytes"
        )
