"""Data that models are evaluated on: data sets, eval sets, and files of text.

DATA -> dataset | eval set | text -> tokens, by the model's own tokenizer
     -> its tokenizer is compared with the model's -> loss, bits per byte, scores
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

import olm_data
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.eval_set import MANIFEST, EvalSet
from olm_data.dataset.tokenizer import TokenizerRules, spec_of
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.extensions.watching.watched import Measured
from olm_data.path_kinds import is_text_name, nearest
from olm_data.storage.store import Store
from olm_train.checkpoint.manifest import TOKENIZER
from olm_train.checkpoint.portable import TrainedModel
from olm_train.data.batch import Batch
from olm_train.distributed.world import World
from olm_train.evaluation.held_out import HeldOut, open_held_out
from olm_train.evaluation.scoring import change
from olm_train.extensions.downstream.tasks import TaskRequests, open_task
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
        return batch.through(
            model,
            partial(by_label_chunked, labels=batch.labels, chunk_size=CHUNK, fp32_logits=True),
        )

    return by_label


class Evaluated(msgspec.Struct, frozen=True):
    """What `--json` prints: which model it was, and its metrics on each of the data by folder."""

    checkpoint: str
    step: int | None
    datasets: dict[str, dict[str, float]]


class EvaluationData:
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
                digest=each.digest,
                sequence_length=_rows_of(each.tokens, self.length)[0],
                by=self._by,
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
        world = World(device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        model = model.to(world.device)
        other = None if against is None else against.to(world.device)
        results = dict[str, dict[str, float]]()
        for name in self._data if names is None else names:
            each = self._data[name]
            if isinstance(each, EvalSet):
                found = self._on_task(each, model, other, world, stop)
            else:
                size = _rows_of(each.tokens, self.length)
                held_out = HeldOut(each, *size, by=self._by, world=world)
                found = held_out.measure(losses_of(model), stop=stop)
            if found is None:
                return None
            results[name] = found
        return results

    def _on_task(
        self,
        eval_set: EvalSet,
        model: Decoder,
        other: Decoder | None,
        world: World,
        stop: Callable[[], bool] | None,
    ) -> dict[str, float] | None:
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


def is_text_file(place: str) -> bool:
    """Whether a place is a file of text; a remote one is known by its name."""
    return Path(place).is_file() or ("://" in place and is_text_name(place))


def tokenized(found: TrainedModel, file: str, scratch: Path) -> str:
    """Tokenise a file of text with the model's tokenizer; return the folder of the data set.

    Args:
        scratch: folder to make, for all that is written.

    Raises:
        OlmError: it cannot be read, or holds no document.
    """
    data = found.tokenizer_json()
    tokenizer = found.tokenizer()  # checked against the lock
    assert data is not None
    scratch.mkdir()
    (scratch / TOKENIZER).write_bytes(data)
    rules = found.rules(tokenizer)
    names = [
        None if token is None else tokenizer.id_to_token(token)
        for token in (rules.begins, rules.eos)
    ]
    output = str(scratch / "tokens")
    try:
        olm_data.tokenize(
            file,
            tokenizer=scratch / TOKENIZER,
            output=output,
            bos=names[0] or "none",
            eos=names[1] or "none",
            workers=1,
        )
    except InputError as error:  # its advice may be an option that this command has not
        if "--" not in (error.fix or ""):
            raise
        raise InputError(
            error.what,
            where=error.where,
            why=error.why,
            fix="give the folder of a dataset (olm-data tokenize has options for such files), or "
            "if they are questions of an eval set (olm-data eval-set build)",
        ) from error
    return output
