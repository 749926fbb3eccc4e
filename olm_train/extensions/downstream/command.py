"""Evaluate a trained model: `olm-train evaluate MODEL --data FILE|DATASET|TASK`.

    run, checkpoint, export, model.save, model of transformers -> weights
    weights -----------------------------------------+-> loss, bits per byte      of a data set
    data set | eval set | text that is tokenised ----+-> accuracy, bits per byte  of a task

The same engine as in a run (`olm_train.evaluation`), so the same numbers. The data that the model
was trained on is not needed. Computes in fp32, alone, on a CUDA device if there is one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from olm_data.command import Command, CountParam, say
from olm_data.extras import needs
from olm_data.printing import emit
from olm_data.run_log.metric_names import (
    EVAL_BPB,
    EVAL_CE_LOSS,
    EVAL_PERPLEXITY,
    EVAL_QUESTIONS,
    EVAL_TOKENS,
)

with needs("evaluating a model"):
    from olm_train.checkpoint.portable import TrainedModel, open_portable
    from olm_train.evaluation.held_out import lines_of_groups
    from olm_train.evaluation.scoring import line_of_task
    from olm_train.extensions.downstream.evaluation import EvaluationData
    from olm_train.extensions.downstream.watched_run import (
        Watch,
        refuse_to_watch,
        stopped_by_sigterm,
    )


@click.command(cls=Command)
@click.argument("model")
@click.option(
    "--data",
    multiple=True,
    required=True,
    help="Folder of a dataset or of an eval set, or a file of text, local or remote; repeat it.",
)
@click.option("--checkpoint", default="latest", show_default=True, help="A step or folder name.")
@click.option("--compare", help="Another model, as MODEL: differences of tasks to it.")
@click.option(
    "--by",
    multiple=True,
    help="Also for each value of a kept column, `input`, `document_length`, `position` in the "
    "document, or tokens of `context`; repeat it.",
)
@click.option(
    "--sequence-length",
    type=CountParam(1),
    help="Tokens of a row.  [default: as it was trained]",
)
@click.option(
    "--watch",
    is_flag=True,
    help="Evaluate each checkpoint of a run as it comes, into RUN/eval/, until the run has ended.",
)
@click.option("--trust", is_flag=True, help="Import classes that the model names: I trust it.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of sentences.")
def main(
    model: str,
    data: tuple[str, ...],
    checkpoint: str,
    compare: str | None,
    by: tuple[str, ...],
    sequence_length: int | None,
    watch: bool,
    trust: bool,
    as_json: bool,
) -> None:
    """Print loss, bits per byte and scores of tasks of a run's newest checkpoint, or of a model.

    \b
    olm-train evaluate runs/first --data tokens/held-out --data evals/arc_easy
    olm-train evaluate runs/first --data letters.txt
    olm-train evaluate runs/first --data tokens/held-out --watch
    """

    def warn(error: Exception) -> None:
        say(f"warning: {error}")

    with tempfile.TemporaryDirectory(prefix="evaluate-") as scratch:
        against = None if compare is None else open_portable(compare, "latest", warn, trust=trust)

        def opened(found: TrainedModel) -> EvaluationData:
            evaluation = EvaluationData(
                found, data, by=by, sequence_length=sequence_length, scratch=Path(scratch)
            )
            if against is not None:
                evaluation.require(against)
            return evaluation

        if watch:
            refuse_to_watch(model, checkpoint, as_json=as_json)
            with stopped_by_sigterm() as stop:
                other = None if against is None else (against.model(), compare or "")
                Watch(model, opened, say, stop, against=other, trust=trust).follow()
            return
        found = open_portable(model, checkpoint, warn, trust=trust)
        evaluation = opened(found)
        result = evaluation.measure(found, against)
    step = "" if found.step is None else f", step {found.step:,}"
    lines = (
        line
        for name, values in result.datasets.items()
        for line in _lines(name, values, f"({found.name}{step})", evaluation.after(name))
    )
    emit(result, as_json, lines)


def _lines(name: str, values: dict[str, float], of: str, after: str) -> list[str]:
    if EVAL_QUESTIONS in values:
        return [f"{name}: {line_of_task(values)} {of}"]
    bits = f"{values[EVAL_BPB]:.4f} bits per byte{after}, " if EVAL_BPB in values else ""
    first = (
        f"{name}: CE loss {values[EVAL_CE_LOSS]:.4f} nats a token, perplexity "
        f"{values[EVAL_PERPLEXITY]:.2f}, {bits}{values[EVAL_TOKENS]:,} tokens {of}"
    )
    return [first, *(f"  {line}" for line in lines_of_groups(values))]
