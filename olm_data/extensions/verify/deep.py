"""`verify --deep`: read original text again and prove that a sample of the tokens is made of it.

    plan.json + where the inputs are now -> units of the chosen shards -> read again
        each document of these shards: text by content hash, found by (input, position)
        some of them:                  encoded by the reference, compared id by id

A text with another hash is a changed input; a text with the same hash and other ids is a damaged
dataset (a finding). Inputs that are gone or changed are listed as such, never passed over. Reads
one batch at a time and the document rows of one shard a thread.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.inputs import InputFile, ReadOptions, RecordOptions, Unit
from olm_data.dataset.job import JobFile
from olm_data.dataset.labels import trained
from olm_data.dataset.manifest import JOB
from olm_data.dataset.plan import Plan, PlannedInput, read_plans
from olm_data.encoders import TextEncoder, make_encoder
from olm_data.errors import InputError, OlmError, UsageError, ValidationError, printable
from olm_data.extensions.verify.shard import VerifyReport, choose
from olm_data.runners.local import granted_cpus
from olm_data.select.selection import content_hashes, document_digests
from olm_data.sources import read_units
from olm_data.sources.base import DocumentBatch
from olm_data.sources.files import current_revision
from olm_data.sources.formats import as_array, describe, is_json
from olm_data.sources.own import refuse_untrusted
from olm_data.sources.readers import chat_reader
from olm_data.storage.store import Store
from olm_data.threads import in_order
from olm_data.tokenization.batches import delimit
from olm_data.tokenizer.tokenizer import TokenizerSpec

DEFAULT_SHARE = Fraction(1, 100)
ENCODED_BYTES = 4 << 20
"""Text of each chosen shard that is encoded again."""


@dataclass(frozen=True, kw_only=True)
class Deep:
    """What `--deep` is asked for.

    Attributes:
        root: folder or URL that the inputs' paths are relative to; None to use job.json.
        share: share of the shards to compare.
        seed: which of them.
        trust: a source of somebody's own that job.json names may be imported.
    """

    root: str | None
    share: Fraction = DEFAULT_SHARE
    seed: int = 0
    trust: bool = False


@dataclass
class _Outcome:
    """What the comparison of one shard, or of several, found.

    Attributes:
        report: what does not agree, and how many documents do.
        gone: inputs that are not there.
        unreadable: input -> why it cannot be read any more.
        changed: input -> documents whose text is another one now, of how many, the first place.
    """

    report: VerifyReport
    gone: set[str] = field(default_factory=set)
    unreadable: dict[str, str] = field(default_factory=dict)
    changed: dict[str, tuple[int, int, str]] = field(default_factory=dict)

    def merge(self, other: _Outcome) -> None:
        self.report.include(other.report.findings)
        self.report.deep += other.report.deep
        self.report.deep_encoded += other.report.deep_encoded
        self.gone |= other.gone
        self.unreadable |= other.unreadable
        for path, (lost, documents, place) in other.changed.items():
            before = self.changed.get(path, (0, 0, place))
            first = before[2] if before[0] else place
            self.changed[path] = (before[0] + lost, before[1] + documents, first)

    def unproved(self) -> list[str]:
        """Return a line for each input that could not be compared with, or not in full."""
        lines = [f"{path}: gone" for path in self.gone]
        lines += [f"{path}: changed ({why})" for path, why in self.unreadable.items()]
        lines += [
            f"{path}: changed ({lost:,} of {documents:,} documents compared have another text "
            f"now, the first at {place})"
            for path, (lost, documents, place) in self.changed.items()
            if lost
        ]
        return sorted(lines)


def check_deep(dataset: Dataset, spec: TokenizerSpec, deep: Deep, report: VerifyReport) -> None:
    """Compare a sample of shards with their original text; add to the report.

    Args:
        spec: the dataset's tokenizer.

    Raises:
        UsageError: nothing tells where the inputs are.
        ValidationError: the plan cannot be read.
    """
    store, manifest = dataset.store, dataset.manifest
    plans = read_plans(store, manifest)
    inputs = find_inputs(store, plans[-1], deep.root, trust=deep.trust)
    rules = manifest.tokenizer
    if (chat := plans[0].settings.chat) is not None:
        encoder: TextEncoder = chat_reader().encoder(spec, chat)
    else:
        encoder = make_encoder("hf", spec, rules.special)  # type: ignore[arg-type]  # the manifest's
    made = {plan.digest: (plan, _whole(plan.settings)) for plan in plans}
    chosen = choose(f"deep {deep.seed} {manifest.digest}", len(manifest.shards), deep.share)

    def compare(index: int) -> _Outcome:
        try:
            plan, options = made[manifest.plan_of(manifest.shards[index].name)]
            return _Comparison(dataset, plan, inputs, options, encoder, deep.seed, index).run()
        except ValidationError as error:  # damage that a sample of the bytes did not meet
            where = error.where or store.url(manifest.shards[index].name)
            outcome = _Outcome(VerifyReport(target=store.root))
            outcome.report.add(where, "content", "unchanged", error.what)
            return outcome

    total = _Outcome(report)
    for outcome in in_order(compare, chosen, granted_cpus()):
        total.merge(outcome)
    report.unproved += total.unproved()
    report.notes.append(
        f"deep: {len(chosen):,} of {len(manifest.shards):,} shards compared with their original "
        f"text (seed {deep.seed})"
    )


def find_inputs(
    store: Store, plan: Plan, root: str | None, *, trust: bool = False
) -> list[InputFile | None]:
    """Return where each input of the plan is now; None where it is gone.

    Args:
        root: where to look for the inputs' paths, whole or without their first folders; None to
            take the places in job.json.
        trust: sources of somebody's own that it names may be imported.

    Raises:
        InputError: it names one, and is not trusted.
        UsageError: no root, and no job.json.
    """
    if root is None:
        try:
            job = JobFile.read_from(store)
        except FileNotFoundError as error:
            raise UsageError(
                "nothing tells where the original text is",
                where=store.root,
                fix="say --root FOLDER: the folder (or URL) that the inputs' paths are relative to",
            ) from error
        except MalformedJson as error:
            raise ValidationError("job.json is damaged", where=store.url(JOB)) from error
        if not trust:
            refuse_untrusted(job.inputs, store.url(JOB))
        return [
            place if place.format == "own" or current_revision(place) else None
            for place in job.inputs
        ]
    return [_below(root.rstrip("/") or "/", item) for item in plan.inputs]


def _below(root: str, item: PlannedInput) -> InputFile | None:
    parts = [part for part in item.path.split("/") if part]
    for first in range(len(parts)):
        place = describe(posixpath.join(root, *parts[first:]), item.bytes, item.revision)
        if is_json(place.url) and item.position == "row":
            place = as_array(place)
        if current_revision(place):
            return place
    return None


def _whole(options: RecordOptions) -> ReadOptions:
    """Return how all records were read, before any was left out."""
    kept = ("text_column", "separator", "delimiter", "on_invalid", "chat")
    return ReadOptions(**{name: getattr(options, name) for name in kept})


_COLUMNS = ["input", "position", "text_bytes", "content_hash"]


class _Comparison:
    """One shard against its original text."""

    def __init__(
        self,
        dataset: Dataset,
        plan: Plan,
        inputs: Sequence[InputFile | None],
        options: ReadOptions,
        encoder: TextEncoder,
        seed: int,
        index: int,
    ) -> None:
        self._manifest, self._encoder, self._options = dataset.manifest, encoder, options
        info = dataset.manifest.shards[index]
        self._shard, self._where = dataset.open_shard(index), f"{dataset.store.root} {info.name}"
        self._first = int(dataset.document_ends[index]) - info.documents
        number = int(info.name.removeprefix("shard-"))
        self._units = plan.units_of(number - plan.first_shard)
        self._inputs = inputs
        table = self._shard.docs.table(_COLUMNS)
        self._input = table["input"].to_numpy()
        self._position = table["position"].to_numpy()
        self._hash = table["content_hash"].to_numpy()
        self._bytes = table["text_bytes"].to_numpy()
        self._matched = np.zeros(len(self._hash), bool)
        self._encode = self._to_encode(seed)
        self._order = np.lexsort((self._position, self._input))
        self._outcome = _Outcome(VerifyReport(target=dataset.store.root))

    def run(self) -> _Outcome:
        outcome = self._outcome
        for index in sorted({unit.input for unit in self._units}):
            path = printable(self._manifest.inputs[index].path)
            units = [unit for unit in self._units if unit.input == index]
            if self._inputs[index] is None:
                outcome.gone.add(path)
                continue
            try:
                for batch in self._read(units):
                    self._compare(batch)
            except InputError as error:
                outcome.unreadable[path] = printable(error.what)
                continue
            rows = np.flatnonzero(self._input == index)
            lost = rows[~self._matched[rows]]
            place = self._place(int(lost[0])) if len(lost) else ""
            outcome.changed[path] = (len(lost), len(rows), place)
        outcome.report.deep = int(self._matched.sum())
        return outcome

    def _read(self, units: list[Unit]) -> Iterator[DocumentBatch]:
        inputs = [place for place in self._inputs if place is not None]
        numbers = np.cumsum([place is not None for place in self._inputs]) - 1
        moved = [
            Unit(input=int(numbers[u.input]), start=u.start, stop=u.stop, bytes=u.bytes)
            for u in units
        ]
        self._now = units[0].input
        yield from read_units(inputs, moved, self._options)

    def _to_encode(self, seed: int) -> np.ndarray:
        """Choose the rows to encode: in an order of their own, up to the budget of text."""
        with np.errstate(over="ignore"):
            key = (self._hash ^ np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
        order = np.argsort(key, kind="stable")
        chosen = np.zeros(len(order), bool)
        within = np.cumsum(self._bytes[order]) <= ENCODED_BYTES
        within[:1] = True
        chosen[order[within]] = True
        return chosen

    def _compare(self, batch: DocumentBatch) -> None:
        if not batch.documents:
            return
        rows = self._rows(batch.positions)
        same = np.zeros(len(rows), bool)
        there = rows >= 0
        hashes = content_hashes(document_digests(batch.data, batch.offsets))
        same[there] = (hashes[there] == self._hash[rows[there]]) & (
            batch.text_bytes[there] == self._bytes[rows[there]]
        )
        self._matched[rows[same]] = True
        for k in np.flatnonzero(same & self._encode[np.maximum(rows, 0)]).tolist():
            self._compare_ids(batch, k, int(rows[k]))

    def _rows(self, positions: np.ndarray) -> np.ndarray:
        """Return the row of the shard at each position of the input being read, or -1."""
        low, high = np.searchsorted(self._input[self._order], [self._now, self._now + 1])
        mine = self._order[low:high]
        if not len(mine):
            return np.full(len(positions), -1)
        at = np.minimum(np.searchsorted(self._position[mine], positions), len(mine) - 1)
        return np.where(self._position[mine[at]] == positions, mine[at], -1)

    def _compare_ids(self, batch: DocumentBatch, k: int, row: int) -> None:
        data = batch.data[batch.offsets[k] : batch.offsets[k + 1]]
        place, report = self._place(row), self._outcome.report
        rules = self._manifest.tokenizer
        try:
            made = self._encoder.encode(data, np.array([0, len(data)], np.int64), lambda _: place)
        except OlmError as error:
            report.add(self._where, place, "text that encodes", error.what)
            return
        ids, _ = delimit(made.ids, made.offsets, np.ones(1, bool), bos=rules.bos, eos=rules.eos)
        ends = self._shard.ends
        stored = self._shard.read(int(ends[row - 1]) if row else 0, int(ends[row]))
        report.deep_encoded += 1
        if np.array_equal(ids, stored):
            if made.trained is not None and (labels := self._shard.labels) is not None:
                first = int(ends[row - 1]) if row else 0
                if not np.array_equal(made.trained, trained(labels, first, int(ends[row]))):
                    where = f"{self._where} document {self._first + row} ({place})"
                    what = "the tokens that the chat trains"
                    report.add(where, "labels", what, "others")
            return
        both = min(len(ids), len(stored))
        differ = np.flatnonzero(ids[:both] != stored[:both])
        at = int(differ[0]) if len(differ) else both
        report.add(
            f"{self._where} document {self._first + row} ({place})",
            f"token {at}",
            f"{_window(ids, at)} of {len(ids):,} from the text",
            f"{_window(stored, at)} of {len(stored):,}",
        )

    def _place(self, row: int) -> str:
        source = self._manifest.inputs[int(self._input[row])]
        return f"{printable(source.path)}, {source.position} {int(self._position[row]):,}"


def _window(ids: np.ndarray, at: int) -> str:
    return f"{ids[at : at + 4].tolist()}"
