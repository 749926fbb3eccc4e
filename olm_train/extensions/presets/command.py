"""The command that says what each preset takes to train: `olm-train presets --gpu h100`.

PRESETS, Gpu --recipe--> table, JSON, or for one preset the part of train.yaml
"""

from __future__ import annotations

import click
import yaml

from olm_data.command import Command
from olm_data.config.schema import modeline
from olm_data.errors import UsageError, suggest
from olm_data.extras import needs
from olm_data.printing import emit, fitted

with needs("planning a model"):
    from olm_train.estimate.gpus import Gpu, gpu_named
    from olm_train.extensions.presets.recipe import PresetOptions, recipe
    from olm_train.model.presets import PRESETS
    from olm_train.run.command import SCHEMA

HEAD = ("preset", "GPUs", "weights", "recomputed", "loss", "micro-batch", "GB")
RECOMPUTED = {"none": "nothing", "selected_ops": "selected ops", "full": "blocks"}


@click.command(cls=Command)
@click.argument("preset", required=False)
@click.option("--gpu", default="h100", help="Kind of accelerator, such as h200. [default: h100]")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def main(preset: str | None, gpu: str, as_json: bool) -> None:
    """Print for each preset the fewest GPUs that train it, and the options that fit there.

    \b
    olm-train presets --gpu h200
    olm-train presets llama3-8b --gpu h100 >> train.yaml

    With PRESET only that one, as the part of train.yaml that it decides.
    """
    kind = gpu_named(gpu)
    if preset is not None and preset not in PRESETS:
        raise UsageError(f"unknown model preset {preset!r}", fix=suggest(preset, PRESETS))
    found = {name: recipe(name, kind) for name in ([preset] if preset else PRESETS)}
    if preset is not None and found[preset] is None:
        raise UsageError(f"no recipe for {preset} on {kind.name}", fix="take a larger --gpu")
    plain = [each and each.summary() for each in found.values()]
    only = found[preset] if preset else None
    if only and not as_json:
        click.echo(text_of(only), nl=False)
        return
    emit(plain[0] if only else plain, as_json, table(kind, found))


def text_of(recipe: PresetOptions) -> str:
    """Return a recipe as a part of train.yaml."""
    tokens = recipe.gpus * recipe.module.rank_microbatch_size
    size = f"global_batch_size: {tokens:_}" + (" or a multiple of it" * recipe.accumulates)
    return (
        f"{modeline(SCHEMA)}\n# {recipe.gpus} x {recipe.gpu.name}: {recipe.memory / 1e9:.3g} of "
        f"{recipe.gpu.budget / 1e9:.3g} GB by the estimate; rows of {recipe.sequence_length:_} "
        f"tokens\n# torchrun --nnodes={recipe.nodes} "
        f"--nproc-per-node={recipe.gpus // recipe.nodes} -m olm_train.run train.yaml\n"
        f"# data_loader: {size}\n" + yaml.safe_dump(recipe.values(), sort_keys=False)
    )


def table(gpu: Gpu, recipes: dict[str, PresetOptions | None], *, width: int = 0) -> list[str]:
    """Return the recipes as lines of at most `width` cells; 0: those of the terminal."""
    rows = [[name, *_cells(each, gpu)] for name, each in recipes.items()]
    lines = fitted(HEAD, rows, left=range(5), width=width)
    return [*lines, *["+: or a multiple of it"] * any("+" in row[5] for row in rows)]


def _cells(recipe: PresetOptions | None, gpu: Gpu) -> list[str]:
    if recipe is None:
        return [f"does not fit any number of {gpu.name}", *[""] * (len(HEAD) - 2)]
    module, dp_config = recipe.module, recipe.module.dp_config
    kept = dp_config.shards and dp_config.reshard_after_forward is False
    weights = f"{dp_config.name.value}{', kept' if kept else ''}"
    each = f"{recipe.nodes} x {recipe.gpus // recipe.nodes}"
    return [
        f"{recipe.gpus}" if recipe.nodes == 1 else each,
        "whole" if recipe.gpus == 1 else weights,
        RECOMPUTED[module.ac_config.mode],
        recipe.loss,
        f"{module.rank_microbatch_size:,}{' +' if recipe.accumulates else ''}",
        f"{recipe.memory / 1e9:.3g}",
    ]
