"""`olm-data stats`: what is in a dataset, counted over every document in bounded memory.

    each shard: ends + docs.parquet, 65,536 documents at a time -> Tally --merge--> Stats
    commit records -> drops by input and reason          a few documents by number -> excerpts

Tallies are exact counts, histograms, the k most extreme documents, and sketches of the kept columns
(sketch.py); they do not grow with the number of documents. Tokens are those stored, BOS and EOS
included. Reads no token but those of the excerpts. Never writes.

Also: summaries of any number of values in bounded memory, which merge: parts may be taken apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from olm_data.dataset.account import dropped_of
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.docs import docs_schema
from olm_data.dataset.tools import PassedCount
from olm_data.printing import Columns
from olm_data.rows.views import view_document
from olm_data.runners.local import granted_cpus
from olm_data.storage.disk import abandoned, scratch
from olm_data.threads import in_order
from olm_data.tokenization.duplicates import later_copies, stored_keys
from olm_data.tokenization.task_results import accounts_of

BINS_AN_OCTAVE = 4
_EDGES = np.unique(np.ceil(2.0 ** (np.arange(62 * BINS_AN_OCTAVE) / BINS_AN_OCTAVE))).astype(
    np.int64
)
_GAMMA = np.log(1.02)  # bins of 2 %: the middle is within 1 %


class LogHistogram:
    """How many positive integers there are between 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ...

    Attributes:
        counts: int64 [bins], values in each bin.
        sums: int64 [bins], sum of the values in each bin.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(len(_EDGES), np.int64)
        self.sums = np.zeros(len(_EDGES), np.int64)

    def add(self, values: np.ndarray) -> None:
        """Add int64 [n] values, each at least 1."""
        bins = np.searchsorted(_EDGES, values, side="right") - 1
        self.counts += np.bincount(bins, minlength=len(_EDGES))
        np.add.at(self.sums, bins, values)

    def merge(self, other: LogHistogram) -> None:
        """Add what another histogram holds."""
        self.counts += other.counts
        self.sums += other.sums

    def bins(self, *, octaves: bool = False) -> list[tuple[int, int, int, int]]:
        """Return (first, last, count, sum) of each bin between the outermost ones in use.

        Args:
            octaves: join the bins to 1, 2-3, 4-7, 8-15, ...
        """
        edges, counts, sums = _EDGES, self.counts, self.sums
        if octaves:
            starts = np.searchsorted(edges, 2 ** np.arange(62))
            edges = edges[starts]
            counts, sums = np.add.reduceat(counts, starts), np.add.reduceat(sums, starts)
        full = np.flatnonzero(counts)
        if not len(full):
            return []
        return [
            (int(edges[i]), int(edges[i + 1]) - 1, int(counts[i]), int(sums[i]))
            for i in range(int(full[0]), int(full[-1]) + 1)
        ]


class Quantiles:
    """Quantiles of numbers, within 1 % of the value.

    Attributes:
        count: finite numbers seen.
        least, most: exact; 0 before there is any.
        odd: numbers that are NaN or infinite; they count for nothing else.
    """

    def __init__(self) -> None:
        self.count = self.odd = 0
        self.least, self.most = np.inf, -np.inf
        self._bins: dict[int, int] = {}  # sorted keys are sorted values

    def add(self, values: np.ndarray) -> None:
        """Add float64 or int64 [n] values."""
        numbers = np.asarray(values, np.float64)
        finite = np.isfinite(numbers)
        self.odd += int(len(numbers) - finite.sum())
        numbers = numbers[finite]
        if not len(numbers):
            return
        self.count += len(numbers)
        self.least = min(self.least, float(numbers.min()))
        self.most = max(self.most, float(numbers.max()))
        size = np.abs(numbers)
        keys = np.zeros(len(numbers), np.int64)
        some = size > 0
        # magnitudes from 5e-324 give keys above 0; the sign puts negative numbers below
        keys[some] = np.ceil(np.log(size[some]) / _GAMMA).astype(np.int64) + 40_000
        keys *= np.sign(numbers).astype(np.int64)
        for key, count in zip(*np.unique(keys, return_counts=True), strict=True):
            self._bins[int(key)] = self._bins.get(int(key), 0) + int(count)

    def merge(self, other: Quantiles) -> None:
        """Add what another sketch holds."""
        self.count += other.count
        self.odd += other.odd
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        for key, count in other._bins.items():
            self._bins[key] = self._bins.get(key, 0) + count

    def at(self, share: float) -> float:
        """Return the value that `share` of the numbers are at most, within 1 %; 0 of no numbers."""
        if not self.count:
            return 0.0
        rank, seen = share * (self.count - 1), 0
        for key in sorted(self._bins):
            seen += self._bins[key]
            if seen > rank:
                size = 0.0 if key == 0 else float(np.exp((abs(key) - 40_000 - 0.5) * _GAMMA))
                return min(max(size if key > 0 else -size, self.least), self.most)
        return self.most


class Frequent:
    """The values that come most often, of any number of different ones.

    Args:
        most: values kept. Every value that makes up more than 1 / `most` of all is among them.

    Attributes:
        total: values seen.
        error: most by which a count may be too low; 0 while there were at most `most` values.
    """

    def __init__(self, most: int = 1000) -> None:
        self.most = most
        self.total = self.error = 0
        self._counts: dict[str, int] = {}

    def add(self, counts: Mapping[str, int]) -> None:
        """Add values with how often each comes."""
        for value, count in counts.items():
            self._counts[value] = self._counts.get(value, 0) + count
            self.total += count
        self._prune()

    def merge(self, other: Frequent) -> None:
        """Add what another summary holds."""
        total = self.total + other.total
        self.add(other._counts)
        self.total, self.error = total, self.error + other.error

    def top(self, count: int) -> list[tuple[str, int]]:
        """Return the most frequent values with counts, each at most `error` too low."""
        return sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))[:count]

    @property
    def distinct(self) -> int | None:
        """How many different values there are; None if there were too many to count."""
        return len(self._counts) if self.error == 0 else None

    def _prune(self) -> None:
        if len(self._counts) <= self.most:
            return
        cut = sorted(self._counts.values(), reverse=True)[self.most]
        self._counts = {value: n - cut for value, n in self._counts.items() if n > cut}
        self.error += cut


class TopK:
    """The `k` smallest keys and the numbers they belong to; among equals, the lower number."""

    def __init__(self, k: int) -> None:
        self.k = k
        self._keys, self._numbers = np.zeros(0), np.zeros(0, np.int64)

    def add(self, keys: np.ndarray, numbers: np.ndarray) -> None:
        """Add float64 [n] keys and int64 [n] numbers."""
        if len(keys) > self.k:  # all that are not above the k-th, so that ties stay complete
            chosen = keys <= np.partition(keys, self.k - 1)[self.k - 1]
            keys, numbers = keys[chosen], numbers[chosen]
        keys = np.concatenate([self._keys, keys])
        numbers = np.concatenate([self._numbers, numbers])
        order = np.lexsort((numbers, keys))[: self.k]
        self._keys, self._numbers = keys[order], numbers[order]

    def merge(self, other: TopK) -> None:
        """Add what another one holds."""
        self.add(other._keys, other._numbers)

    def items(self) -> list[tuple[float, int]]:
        """Return (key, number) pairs, smallest key first."""
        return list(zip(self._keys.tolist(), self._numbers.tolist(), strict=True))


EXTREMES = 5
EXTREME_BYTES = 200
"""Shorter documents are no candidates for the extremes: a word of its own tells nothing."""

EXCERPT = 280
TOP_VALUES = 12
LONGEST_VALUE = 200
SHARES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


class InputCount(msgspec.Struct, frozen=True, kw_only=True):
    """What one input file became."""

    path: str
    documents: int
    tokens: int
    text_bytes: int
    held_out: int
    dropped: dict[str, int]
    tokens_per_byte: float


class ColumnCount(msgspec.Struct, frozen=True, kw_only=True):
    """A kept column.

    Attributes:
        kind: its Arrow type.
        nulls: documents without a value.
        top: most frequent values of a string or boolean column; `error` is the most by which a
            count may be too low, `distinct` how many values there are (None: too many to count).
        least, middle, most: of a number column; the median is within 1 %.
        odd: NaN and infinite numbers.
    """

    name: str
    kind: str
    nulls: int
    top: list[tuple[str, int]] | None = None
    distinct: int | None = None
    error: int = 0
    least: float | None = None
    middle: float | None = None
    most: float | None = None
    odd: int = 0


class Extreme(msgspec.Struct, frozen=True, kw_only=True):
    """A document at one end of tokens per byte; `text` is its beginning."""

    document: int
    tokens: int
    text_bytes: int
    tokens_per_byte: float
    input: str
    position: int
    position_kind: str
    text: str


class Bin(msgspec.Struct, frozen=True):
    """The documents of `first` to `last` tokens."""

    first: int
    last: int
    documents: int
    tokens: int


_COLUMN = (
    *("name=column", "kind", "nulls=without a value", "distinct=values", "top=most frequent"),
    *("error=counts too low by", "least", "middle=median", "most", "odd=not finite"),
)
_EXTREME = ("document", "tokens", "text_bytes", "tokens_per_byte", "text")


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a dataset.

    Attributes:
        histogram: documents by length, in bins of equal ratio; `octaves` in wider ones.
        quantiles: share of documents -> length that so many have at most, within 1 %.
        inputs: the inputs with the most tokens, most first; `more` sums up the other ones.
        passed_over: what lay among the inputs and was not read, by reason.
        duplicates: documents equal to an earlier one, of all splits, and their bytes of text.
        few, many: documents with the fewest and the most tokens per byte of text, of those with at
            least `EXTREME_BYTES` bytes; BOS and EOS not counted.
        tokens_per_byte: stored tokens a byte of text.
    """

    target: str
    digest: str
    tokenizer: str
    split: str
    shards: int
    documents: int
    tokens: int
    text_bytes: int
    documents_in: int
    other_split: int
    dropped: dict[str, int]
    shortest: int
    longest: int
    quantiles: dict[str, float]
    histogram: list[Bin]
    octaves: list[Bin]
    inputs: list[InputCount]
    inputs_all: int
    more: InputCount | None
    columns: list[ColumnCount]
    duplicates: int
    duplicate_bytes: int
    passed_over: dict[str, PassedCount]
    few: list[Extreme]
    many: list[Extreme]
    tokens_per_byte: float

    COLUMNS: ClassVar = {
        "histogram": None,
        "octaves": Columns(("first=length from", "last=to", "documents", "tokens")),
        "columns": Columns(_COLUMN),
        "few": Columns(_EXTREME, name="fewest tokens a byte"),
        "many": Columns(_EXTREME, name="most tokens a byte"),
    }


class Tally:
    """Counts over some documents; tallies of parts merge to that of the whole.

    Args:
        inputs: number of inputs of the dataset.
        keep: Arrow schema of the kept columns.
        extra: tokens of each document that are no text: BOS and EOS.
    """

    def __init__(self, inputs: int, keep: pa.Schema, extra: int) -> None:
        self.keep, self._extra = keep, extra
        self.of_inputs = np.zeros((inputs, 3), np.int64)  # documents, tokens, bytes
        self.lengths, self.quantiles = LogHistogram(), Quantiles()
        self.few, self.many = TopK(EXTREMES), TopK(EXTREMES)
        self.nulls: Counter[str] = Counter()
        self.values = {f.name: Frequent() for f in keep if not _is_number(f.type)}
        self.numbers = {f.name: Quantiles() for f in keep if _is_number(f.type)}

    def add(self, first: int, lengths: np.ndarray, rows: pa.RecordBatch) -> None:
        """Add documents.

        Args:
            first: number of the first document.
            lengths: int64 [d], tokens of each.
            rows: their rows of docs.parquet: `input`, `text_bytes` and the kept columns.
        """
        inputs = rows.column("input").to_numpy()
        sizes = rows.column("text_bytes").to_numpy()
        some, inverse = np.unique(inputs, return_inverse=True)
        for column, weights in enumerate((None, lengths, sizes)):
            # float64 sums of one batch are exact below 2^53
            counts = np.bincount(inverse, weights, len(some)).astype(np.int64)
            self.of_inputs[some, column] += counts
        self.lengths.add(lengths)
        self.quantiles.add(lengths)
        long = np.flatnonzero(sizes >= EXTREME_BYTES)
        ratio = (lengths[long] - self._extra) / sizes[long]
        self.few.add(ratio, first + long)
        self.many.add(-ratio, first + long)
        for name in self.keep.names:
            column = rows.column(name)
            self.nulls[name] += column.null_count
            if name in self.numbers:
                numbers = column.drop_null().cast(pa.float64(), safe=False)
                self.numbers[name].add(numbers.to_numpy(zero_copy_only=False))
            else:
                self.values[name].add(_counted(column))

    def merge(self, other: Tally) -> None:
        """Add what another tally holds."""
        self.of_inputs += other.of_inputs
        self.nulls.update(other.nulls)
        pairs: list[tuple[Any, Any]] = [
            (self.lengths, other.lengths),
            (self.quantiles, other.quantiles),
            (self.few, other.few),
            (self.many, other.many),
            *((mine, other.values[name]) for name, mine in self.values.items()),
            *((mine, other.numbers[name]) for name, mine in self.numbers.items()),
        ]
        for mine, theirs in pairs:
            mine.merge(theirs)

    def columns(self) -> list[ColumnCount]:
        """Return what is known of the kept columns."""
        return [self._column(kept.name, str(kept.type)) for kept in self.keep]

    def _column(self, name: str, kind: str) -> ColumnCount:
        known: dict[str, Any] = {"name": name, "kind": kind, "nulls": self.nulls[name]}
        if name in self.values:
            values = self.values[name]
            return ColumnCount(
                **known, top=values.top(TOP_VALUES), distinct=values.distinct, error=values.error
            )
        numbers = self.numbers[name]
        known["odd"] = numbers.odd
        if not numbers.count:
            return ColumnCount(**known)
        middle = numbers.at(0.5)
        return ColumnCount(**known, least=numbers.least, middle=middle, most=numbers.most)


def collect(
    target: str, *, top: int = 20, watch: Callable[[int, int], None] | None = None
) -> Stats:
    """Count a dataset.

    Args:
        target: folder or URL of a dataset.
        top: inputs to list; the rest is summed up.
        watch: called with (documents counted, documents in all).

    Raises:
        InputError, ValidationError: there is no sound dataset.
    """
    dataset = Dataset.open(target)
    manifest, totals = dataset.manifest, dataset.manifest.totals
    tally = _tally(dataset, watch)
    inputs, more = _inputs(dataset, tally, top)
    duplicates, duplicate_bytes = _duplicates(dataset)
    return Stats(
        target=target,
        digest=dataset.digest,
        tokenizer=dataset.tokenizer_name,
        split=manifest.split or "train",
        shards=len(manifest.shards),
        documents=totals.documents,
        tokens=totals.tokens,
        text_bytes=totals.text_bytes,
        documents_in=totals.documents_in,
        other_split=totals.other_split,
        dropped=dict(manifest.dropped),
        shortest=int(tally.quantiles.least) if totals.documents else 0,
        longest=int(tally.quantiles.most) if totals.documents else 0,
        quantiles={f"{share:g}": round(tally.quantiles.at(share), 1) for share in SHARES},
        histogram=[Bin(*row) for row in tally.lengths.bins()],
        octaves=[Bin(*row) for row in tally.lengths.bins(octaves=True)],
        inputs=inputs,
        inputs_all=len(manifest.inputs),
        more=more,
        columns=tally.columns(),
        duplicates=duplicates,
        passed_over=manifest.tools.passed_over,
        duplicate_bytes=duplicate_bytes,
        few=_extremes(dataset, tally.few),
        many=_extremes(dataset, tally.many),
        tokens_per_byte=totals.tokens / max(totals.text_bytes, 1),
    )


def _tally(dataset: Dataset, watch: Callable[[int, int], None] | None) -> Tally:
    """Count all shards, a few at a time."""
    rules, inputs = dataset.manifest.tokenizer, len(dataset.manifest.inputs)
    extra = len(rules.delimiters)
    shards = len(dataset.manifest.shards)
    keep = pa.schema([])
    if shards:
        keep = pa.schema(list(dataset.open_shard(0).docs.schema())[len(docs_schema()) :])

    def count(index: int) -> Tally:
        tally, shard = Tally(inputs, keep, extra), dataset.open_shard(index)
        first = int(dataset.document_ends[index]) - dataset.manifest.shards[index].documents
        at = 0
        for rows in shard.docs.batches(["input", "text_bytes", *keep.names]):
            stop = at + rows.num_rows
            before = int(shard.ends[at - 1]) if at else 0
            lengths = np.diff(shard.ends[at:stop].astype(np.int64), prepend=before)
            tally.add(first + at, lengths, rows)
            at = stop
        return tally

    total, threads = Tally(inputs, keep, extra), granted_cpus()
    for index, part in enumerate(in_order(count, range(shards), threads, ahead=2 * threads)):
        total.merge(part)
        if watch is not None:
            watch(int(dataset.document_ends[index]), dataset.documents)
    return total


def _inputs(dataset: Dataset, tally: Tally, top: int) -> tuple[list[InputCount], InputCount | None]:
    """Return the inputs with the most tokens, and the sum of the others."""
    accounts = accounts_of(dataset)

    def count(name: str, indices: list[int]) -> InputCount:
        documents, tokens, size = tally.of_inputs[indices].sum(axis=0).tolist()
        found = [accounts[index] for index in indices if index in accounts]
        return InputCount(
            path=name,
            documents=documents,
            tokens=tokens,
            text_bytes=size,
            held_out=sum(account.held_out for account in found),
            dropped=dict(sorted(dropped_of(found).items())),
            tokens_per_byte=tokens / max(size, 1),
        )

    inputs = dataset.manifest.inputs
    order = np.lexsort((np.arange(len(inputs)), -tally.of_inputs[:, 1])).tolist()
    rest = order[top:]
    shown = [count(inputs[index].path, [index]) for index in order[:top]]
    return shown, count(f"{len(rest):,} more inputs", rest) if rest else None


def _duplicates(dataset: Dataset) -> tuple[int, int]:
    """Return how many documents equal an earlier one; the manifest knows if it was counted then."""
    known = dataset.manifest.tools.copies
    if known is not None:
        return known.duplicates, known.duplicate_bytes
    shards = [(dataset.store, info) for info in dataset.manifest.shards]
    copies = size = 0
    abandoned(remove=True)
    with scratch() as folder:
        for numbers, sizes in later_copies(stored_keys(shards), dataset.documents, folder):
            copies += len(numbers)
            size += int(sizes.sum())
    return copies, size


_SAME = ("document", "tokens", "text_bytes", "input", "position", "position_kind")
"""Fields of an `Extreme` that are those of the document's view."""


def _extremes(dataset: Dataset, top: TopK) -> list[Extreme]:
    if not top.items():
        return []
    found = []
    for ratio, number in top.items():
        view = view_document(dataset, number, most_tokens=EXCERPT)
        found.append(
            Extreme(
                **{name: getattr(view, name) for name in _SAME},
                tokens_per_byte=abs(ratio),
                text=view.text.rstrip("\ufffd")[:EXCERPT],  # a character cut in two is no text
            )
        )
    return found


def _is_number(kind: pa.DataType) -> bool:
    return bool(kinds.is_integer(kind) or kinds.is_floating(kind))


def _counted(column: pa.Array) -> dict[str, int]:
    """Return how often each value comes, nulls left out; long values are cut."""
    text = column.cast(pa.string()) if not kinds.is_string(column.type) else column
    short = pc.utf8_slice_codeunits(text, 0, LONGEST_VALUE).drop_null()
    counts = pc.value_counts(short)
    return dict(
        zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True)
    )
