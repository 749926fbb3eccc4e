"""Evaluate a trained model: `olm-train evaluate MODEL --data FILE|DATASET|TASK`.

    run, checkpoint, export, model.save, model of transformers -> weights
    weights -----------------------------------------+-> loss, bits per byte      of a data set
    data set | eval set | text that is tokenised ----+-> accuracy, bits per byte  of a task

The same engine as in a run (`olm_train.evaluation`), so the same numbers. The data that the model
was trained on is not needed. Computes in fp32, alone, on a CUDA device if there is one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
import msgspec

from olm_data.command import Command, Count, say
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.eval_set import MANIFEST, EvalSet
from olm_data.dataset.tokenizer import TokenizerRules, spec_of
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.extensions.watching.watched import Measured
from olm_data.extras import needs
from olm_data.kinds import nearest
from olm_data.printing import emit
from olm_data.run_log.metric_names import (
    EVAL_BPB,
    EVAL_CE_LOSS,
    EVAL_PERPLEXITY,
    EVAL_QUESTIONS,
    EVAL_TOKENS,
)
from olm_data.storage.store import Store

with needs("evaluating a model"):
    import torch

    from olm_train.checkpoint.manifest import TOKENIZER
    from olm_train.checkpoint.portable import TrainedModel, open_portable
    from olm_train.data.batch import Batch
    from olm_train.distributed.world import World
    from olm_train.evaluation.held_out import HeldOut, lines_of_groups, open_held_out
    from olm_train.evaluation.scoring import change, line_of_task
    from olm_train.extensions.downstream.stop import stopped_by_sigterm
    from olm_train.extensions.downstream.tasks import TaskRequests, open_task
    from olm_train.extensions.downstream.text_file import is_text_file, tokenized
    from olm_train.extensions.downstream.watched_run import Watch, refuse_to_watch
    from olm_train.model.decoder import Decoder
    from olm_train.model.loss_chunked import by_label_chunked

ROWS = 8
"""Rows of a batch."""
CHUNK = 1024
"""Tokens whose logits exist at a time."""


def losses_of(model: Decoder) -> Callable[[Batch], torch.Tensor]:
    """Return what gives the loss of each label of a batch, fp32 [b, S] in nats."""
    device = next(model.parameters()).device
    known = model.config.vocab_size

    @torch.no_grad()
    def by_label(batch: Batch) -> torch.Tensor:
        if (most := int(batch.input_ids.max())) >= known:
            raise ValidationError(f"the data hold the id {most:,}, and the model knows {known:,}")
        batch = batch.to(device)
        losses: torch.Tensor = model(
            batch.input_ids,
            doc_start=batch.doc_start,
            positions=batch.positions,
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
            reduce=partial(
                by_label_chunked, labels=batch.labels, chunk_size=CHUNK, fp32_logits=True
            ),
        )
        return losses

    return by_label


class Evaluated(msgspec.Struct, frozen=True):
    """What `--json` prints: which model it was, and its metrics on each of the data by folder."""

    checkpoint: str
    step: int | None
    datasets: dict[str, dict[str, float]]


class Evaluation:
    """Data that models are evaluated on, one model after the other.

    Args:
        found: the model that the data must fit.
        data: folders of data sets or eval sets, or files of text.
        by: see `HeldOut`.
        sequence_length: tokens of a row; None: as the model was trained.
        scratch: folder for the tokens of text; None: data are folders alone.

    Attributes:
        length: tokens of a row.

    Raises:
        InputError, ValidationError: there is no such data, or they are of another tokenizer.
        UsageError: nobody knows how long rows are.
    """

    def __init__(
        self,
        found: TrainedModel,
        data: Sequence[str],
        *,
        by: Sequence[str] = (),
        sequence_length: int | None = None,
        scratch: Path | None = None,
    ) -> None:
        self.length = sequence_length or _length_of(found)
        self._by, self._data = tuple(by), dict[str, Dataset | EvalSet]()
        for number, place in enumerate(data):
            self._data[place] = self._open(found, place, scratch and scratch / str(number))

    def require(self, other: TrainedModel) -> None:
        """Refuse another model that the data do not fit; raises as the constructor does.

        Raises:
            UsageError: also where there is no task: only those have questions to compare.
        """
        if not any(isinstance(each, EvalSet) for each in self._data.values()):
            raise UsageError(
                "there is nothing to compare: no task is among the data",
                where="--compare",
                fix="give an eval set by --data, or leave --compare out",
            )
        for name, each in self._data.items():
            if isinstance(each, EvalSet):
                _check(other, each.info.tokenizer, name)

    @property
    def places(self) -> dict[str, bool]:
        """The data as they were given, and whether each is a task."""
        return {place: isinstance(each, EvalSet) for place, each in self._data.items()}

    def after(self, name: str) -> str:
        """Return after which token the first one of a document was predicted: " after EOS"."""
        each = self._data[name]
        if isinstance(each, EvalSet):
            return ""
        return " after BOS" if each.manifest.tokenizer.eos_begins is None else " after EOS"

    def measured(self) -> dict[str, Measured]:
        """Return what each of the data is, and how it is measured."""
        return {
            name: Measured(digest=each.info.digest, sequence_length=self.length)
            if isinstance(each, EvalSet)
            else Measured(
                digest=each.digest, sequence_length=self._length_of_row(each), by=self._by
            )
            for name, each in self._data.items()
        }

    def measure(self, found: TrainedModel, against: TrainedModel | None = None) -> Evaluated:
        """Return the results of a model; differences to another one where that is given."""
        other = None if against is None else against.model()
        results = self.results(found.model(), against=other)
        assert results is not None
        return Evaluated(found.name, found.step, results)

    def results(
        self,
        model: Decoder,
        names: Sequence[str] | None = None,
        *,
        against: Decoder | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> dict[str, dict[str, float]] | None:
        """Return the metrics of weights by data; None where `stop`, asked before each batch, says
        to leave off.

        Args:
            model: moved to the device that evaluates.
            names: of the data; None: all.
            against: others, which differences are to.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = model.to(device)
        other = None if against is None else against.to(device)
        results = dict[str, dict[str, float]]()
        for name in self._data if names is None else names:
            each = self._data[name]
            if isinstance(each, EvalSet):
                found = self._on_task(each, model, other, device, stop)
            else:
                found = self._on_dataset(each, model, device, stop)
            if found is None:
                return None
            results[name] = found
        return results

    def _length_of_row(self, dataset: Dataset) -> int:
        return _rows_of(dataset.tokens, self.length)[0]

    def _on_dataset(
        self,
        dataset: Dataset,
        model: Decoder,
        device: torch.device,
        stop: Callable[[], bool] | None,
    ) -> dict[str, float] | None:
        size = _rows_of(dataset.tokens, self.length)
        held_out = HeldOut(dataset, *size, by=self._by, world=World(device=device))
        return held_out.measure(losses_of(model), stop=stop)

    def _on_task(
        self,
        eval_set: EvalSet,
        model: Decoder,
        other: Decoder | None,
        device: torch.device,
        stop: Callable[[], bool] | None,
    ) -> dict[str, float] | None:
        world = World(device=device)
        size = _rows_of(len(eval_set.requests.tokens), self.length)
        task = TaskRequests(eval_set, *size, world=world)
        scores = task.measure(losses_of(model), stop=stop)
        if scores is None or other is None:
            return None if scores is None else scores.metrics()
        before = task.measure(losses_of(other), stop=stop)
        if before is None:
            return None
        name = scores.primary
        return scores.metrics() | change(scores.values[name], before.values[name]).metrics(name)

    def _open(self, found: TrainedModel, place: str, scratch: Path | None) -> Dataset | EvalSet:
        if "://" not in place and not os.path.lexists(place):
            raise InputError(
                "there is nothing at this path",
                where=place,
                fix=nearest(
                    place, "check it; --data takes a dataset, an eval set or a file of text"
                ),
            )
        if scratch is not None and is_text_file(place):
            place = tokenized(found, place, scratch)
        opened: Dataset | EvalSet
        if Store(place).exists(MANIFEST):
            opened = open_task(place, place, found.recorded_lock)
            rules: TokenizerRules = opened.info.tokenizer
        else:
            opened = open_held_out(place, place, found.recorded_lock)
            rules = opened.manifest.tokenizer
        if found.recorded_lock is None:
            _check(found, rules, place)
        return opened


def _rows_of(tokens: int, longest: int) -> tuple[int, int]:
    """Return tokens of a row and of a batch for so many tokens: few of them make few rows."""
    length = max(1, min(longest, tokens))
    return length, length * max(1, min(ROWS, -(-tokens // length)))


def _length_of(found: TrainedModel) -> int:
    if found.recorded_lock is None:
        raise UsageError(
            "nobody recorded how long the rows were that this model was trained on",
            where=found.folder,
            fix="say it: --sequence-length TOKENS",
        )
    return found.recorded_lock.sequence_length


def _check(found: TrainedModel, rules: TokenizerRules, place: str) -> None:
    """Refuse data of another tokenizer than that which lies beside weights without a lock."""
    data = found.tokenizer_json()
    if data is None:
        raise InputError(
            f"there is no {TOKENIZER} with this model",
            where=found.folder,
            why="what its token ids mean is not known",
            fix="put its tokenizer.json there; model.save(folder, tokenizer=...) does",
        )
    # by the ids that it gives: a library that saved it may have spelled the file otherwise
    spec = spec_of(data, rules, found.folder, TOKENIZER)
    if (spec.probe_sha256, spec.vocab_size) != (rules.probe_sha256, rules.vocab_size):
        raise ValidationError(
            "the data were made by another tokenizer than the model's",
            where=place,
            why="its losses would mean nothing",
            fix="tokenise them with the tokenizer of the model",
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
    type=Count(1),
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

        def opened(found: TrainedModel) -> Evaluation:
            evaluation = Evaluation(
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
