"""`olm-data train-tokenizer`: a byte-level BPE tokenizer from the user's own text.

    documents of any source -> pieces of at most 1 MiB -> BPE trainer -> tokenizer.json

Byte-level, so that every text has ids and decodes back exactly. The same input gives the same file:
the trainer breaks ties by id, and documents are fed in input order. The file is written in one
step, or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from olm_data.errors import ConflictError, InputError, UsageError
from olm_data.regular_files import open_regular
from olm_data.sources import SourcePlan, plan_units, read_units
from olm_data.storage.disk import io_errors
from olm_data.storage.output_paths import refuse_output
from olm_data.storage.store import Store
from olm_data.tokenizer.tokenizer import TokenizerSpec, spec_from_bytes

DEFAULT_SPECIAL = ("<|endoftext|>",)
# What may become one token, as in cl100k: a word with the space before it, up to three digits, a
# run of signs, line breaks by themselves; written without possessive quantifiers.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECE = 1 << 20  # characters given to the trainer at once; cuts at line breaks where there are any


@dataclass
class TextCounts:
    """What was read.

    Attributes:
        documents, text_bytes: that became text.
        dropped: records that did not, by reason (`DROP_REASONS`).
        first: the first one of each reason: path of its input, and its place there.
    """

    documents: int = 0
    text_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainedTokenizer:
    """What was made: a file, the tokenizer in it, and what it was trained on."""

    path: Path
    tokenizer: TokenizerSpec
    text: TextCounts


def train_tokenizer(
    source: SourcePlan,
    output: str | Path,
    *,
    vocab_size: int,
    special: Sequence[str] = DEFAULT_SPECIAL,
    overwrite: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> TrainedTokenizer:
    """Train a tokenizer on a source and write it.

    Args:
        output: the `tokenizer.json` to write.
        vocab_size: entries wanted, special tokens included.
        special: special tokens; they get the first ids. The first one ends documents.
        overwrite: replace another file at the output.
        report: called after each batch with the bytes of text read so far, and those expected.

    Raises:
        ConflictError: another file is at the output, and `overwrite` is not set.
        UsageError: a vocabulary too small for the bytes and special tokens, or an output that is
            no file's name.
        InputError: there is no text.
        ResourceError: the file cannot be written.
    """
    refuse_output(str(output), "--output", "local file")
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    least = 256 + len(special)
    if not special or vocab_size < least:
        raise UsageError(
            f"a vocabulary of {vocab_size} is too small",
            where=f"--vocab-size {vocab_size}",
            why="each byte needs an entry, and so does each special token",
            fix=f"say --vocab-size {max(least, 512)} or more, with at least one --special",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    counts = TextCounts()
    tokenizer.train_from_iterator(_pieces(source, counts, report), trainer)
    if not counts.documents:
        raise InputError(
            "the input holds no text to learn from",
            where=source.name,
            why=f"{counts.dropped.total()} records were dropped",
        )
    data = tokenizer.to_str(pretty=True).encode()
    path = Path(output)
    store = Store(path.parent)
    if store.exists(path.name) and not overwrite and not _holds(path, data):
        raise ConflictError(
            "another file is here",
            where=str(path),
            why="datasets and models may depend on it, if it is a tokenizer",
            fix="choose another --output, or replace it with --overwrite",
        )
    store.put(path.name, data)
    return TrainedTokenizer(
        path=path,
        tokenizer=spec_from_bytes(data, name=path.stem, eos=special[0]),
        text=counts,
    )


def _holds(path: Path, data: bytes) -> bool:
    with io_errors(str(path)), open_regular(path) as file:
        return file.read(len(data) + 1) == data


def _pieces(
    source: SourcePlan, counts: TextCounts, report: Callable[[int, int], None]
) -> Iterator[str | list[str]]:
    """Yield the text of a source in pieces of bounded size, counting what goes by."""
    units = [
        unit
        for index, input in enumerate(source.inputs)
        for unit in plan_units(index, input, source.options, target_bytes=1 << 40)
    ]
    expected = sum(unit.bytes for unit in units)
    for batch in read_units(source.inputs, units, source.options):
        counts.documents += batch.documents
        counts.text_bytes += len(batch.data)
        for drop in batch.dropped:
            counts.dropped[drop.reason] += 1
            input = source.inputs[drop.input]
            counts.first.setdefault(drop.reason, f"{input.path}, {input.position} {drop.position}")
        report(counts.text_bytes, expected)
        for k in range(batch.documents):
            yield from _cut(batch.text(k))


def _cut(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE:
        stop = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]
