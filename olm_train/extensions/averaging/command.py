"""The mean of the weights of several checkpoints: `olm-train merge CHECKPOINT... --output FOLDER`.

CHECKPOINTs -> verified -> one tensor at a time, summed in fp64 -> FOLDER, a checkpoint of weights
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import click

from olm_data.command import Command, say
from olm_data.errors import UsageError
from olm_data.extras import needs
from olm_data.printing import emit

with needs("merging checkpoints"):
    from olm_train.checkpoint.load import find_checkpoint
    from olm_train.distributed.world import World
    from olm_train.extensions.averaging.merge import merge_checkpoints
    from olm_train.extensions.averaging.weighting import Weighting


def parse_weights(text: str) -> Weighting | Sequence[float]:
    """Return what `--weights` says: a name, or numbers with commas between.

    Raises:
        UsageError: it is neither.
    """
    for name in get_args(Weighting):
        if text == name:
            return name
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"{text!r} is neither {', '.join(get_args(Weighting))} nor numbers",
            where="--weights",
            fix="give one number a checkpoint, such as 1,2,3",
        ) from None


@click.command(cls=Command)
@click.argument("checkpoints", nargs=-1, required=True)
@click.option("--output", "--out", required=True, help="Folder to make; local or s3://.")
@click.option(
    "--weights",
    default="uniform",
    show_default=True,
    help="uniform, linear (1, 2, 3, ...), decay (as if the rate had fallen), or 1,2,3: a number "
    "each.",
)
@click.option("--json", "as_json", is_flag=True, help="Print merge.json instead of sentences.")
def main(checkpoints: tuple[str, ...], output: str, weights: str, as_json: bool) -> None:
    """Write the weighted mean of the weights of checkpoints of one model.

    \b
    olm-train merge runs/a/step00000800 runs/a/step00000900 runs/a/step00001000 -o runs/a/last3
    olm-train merge runs/a/last3 runs/b --weights 3,1 -o merged

    A run's folder stands for its newest checkpoint. generate, evaluate and export read FOLDER.
    """
    chosen = parse_weights(weights)
    found = [find_checkpoint(place, World(), say) for place in checkpoints]
    folder, merge = merge_checkpoints(found, chosen, output)
    emit(merge, as_json)
    say(f"the mean of {merge.count:,} weights: {folder}")
