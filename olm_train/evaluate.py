"""Loss of a trained model on datasets: `olm-train evaluate MODEL DATASET...`.

    run, checkpoint or export -> weights, lock -+-> loss of each label, summed -> nats a token
    dataset of the same tokenizer --------------+

The data that the model was trained on is not needed. Computes in fp32, alone, on a CUDA device if
there is one. Never: writes.
"""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import click

from olm_data.command import reported
from olm_data.dataset.dataset import Dataset
from olm_data.errors import shown
from olm_data.extras import needs
from olm_data.run_log.metric_names import EVAL_CE_LOSS, EVAL_PERPLEXITY, EVAL_TOKENS

with needs("evaluating a model"):
    import torch

    from olm_train.callbacks.evaluator import open_held_out, perplexity
    from olm_train.checkpoint.portable import Portable, open_portable
    from olm_train.data.loader import EvalLoader
    from olm_train.model.decoder import Decoder
    from olm_train.model.loss import count_valid
    from olm_train.model.loss_chunked import by_label_chunked

ROWS = 8
"""Rows of a batch."""
CHUNK = 1024
"""Tokens whose logits exist at a time."""


@torch.no_grad()
def evaluate(model: Decoder, dataset: Dataset, sequence_length: int) -> dict[str, float]:
    """Return cross entropy in nats a label, perplexity, and number of labels on a dataset.

    Args:
        model: on any device.
        dataset: of the model's tokenizer.
        sequence_length: tokens of a row.
    """
    device = next(model.parameters()).device
    length = max(1, min(sequence_length, dataset.tokens))
    total, count = 0.0, 0
    for batch in EvalLoader(dataset, length, ROWS * length):
        batch = batch.to(device)
        losses = model(
            batch.input_ids,
            doc_start=batch.doc_start,
            positions=batch.positions,
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
            reduce=partial(by_label_chunked, labels=batch.labels, chunk_size=CHUNK),
        )
        total += losses.sum(dtype=torch.float64).item()
        count += int(count_valid(batch.labels))
    loss = total / count if count else math.nan
    return {EVAL_CE_LOSS: loss, EVAL_PERPLEXITY: perplexity(loss), EVAL_TOKENS: count}


def evaluate_all(found: Portable, folders: tuple[str, ...]) -> dict[str, Any]:
    """Return the results of a model on several datasets by folder, and which model it was."""
    datasets = {folder: open_held_out(folder, folder, found.lock) for folder in folders}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, length = found.model().to(device), found.lock.sequence_length
    return {
        "checkpoint": found.name,
        "step": found.step,
        "datasets": {name: evaluate(model, data, length) for name, data in datasets.items()},
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model")
@click.argument("datasets", nargs=-1, required=True)
@click.option("--checkpoint", default="latest", show_default=True, help="A step or folder name.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of sentences.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(
    model: str, datasets: tuple[str, ...], checkpoint: str, as_json: bool, debug: bool
) -> None:
    """Print the loss of a run's newest checkpoint, a checkpoint or an exported model on datasets.

    \b
    olm-train evaluate runs/first tokens/held-out
    """
    with reported(debug=debug):
        found = open_portable(
            model, checkpoint, lambda error: click.echo(shown(f"warning: {error}"), err=True)
        )
        result = evaluate_all(found, datasets)
    if as_json:
        click.echo(json.dumps(result))
        return
    for name, values in result["datasets"].items():
        click.echo(
            f"{name}: CE loss {values[EVAL_CE_LOSS]:.4f} nats a token, perplexity "
            f"{values[EVAL_PERPLEXITY]:.2f}, {values[EVAL_TOKENS]:,} tokens "
            f"({found.name}, step {found.step:,})"
        )
