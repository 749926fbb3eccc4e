"""Any hub dataset through the `datasets` library: `hf:ORG/NAME[:CONFIG]`, streamed.

    hf:ORG/NAME:CONFIG + split -> one input a shard, pinned to a commit -> Arrow tables

For the datasets the catalogue knows, `named.py` reads the files themselves, which is faster and
cuts finer. Here the library decides what a row is; a shard of it is one input and one unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlencode

import pyarrow as pa

from olm_data.dataset.inputs import InputFile, ReadOptions, Unit
from olm_data.errors import InputError, UsageError, said_by
from olm_data.extras import needs
from olm_data.sources.base import ColumnKinds, DocumentBatch, Scan, TextOf
from olm_data.sources.columns import kinds_of, table_schema
from olm_data.sources.rows import documents_of, table_of
from olm_data.storage.hub import Repository, hub_errors

UNKNOWN_BYTES = 256 << 20  # planned for a shard whose size the hub does not tell
ROWS = 256  # rows asked for at a time; batches are cut by bytes afterwards


def list_inputs(name: str, split: str) -> tuple[InputFile, ...]:
    """Return one input for each shard of a dataset's split.

    Args:
        name: `ORG/NAME` or `ORG/NAME:CONFIG`.
        split: the dataset's split, e.g. "train".

    Raises:
        UsageError: the `datasets` library is not installed, or there is no such config or split.
        InputError: there is no such dataset.
        StorageError: the hub cannot be reached.
    """
    repository, _, config = name.partition(":")
    _library(repository)  # before the network is asked
    commit = Repository("dataset", repository).required_commit()
    dataset = _load(repository, config, split, commit)
    shards = int(dataset.num_shards)
    size = getattr(dataset.info, "dataset_size", None) or 0
    label = f"hf:{name}/{split}"
    place = {"repository": repository, "config": config, "split": split, "commit": commit}
    return tuple(
        InputFile(
            path=f"{label}/{k:05d}-of-{shards:05d}",
            url="hf:" + urlencode({**place, "shard": k, "shards": shards}),
            bytes=size // shards,
            revision=commit,
            format="hub",
            position="row",
        )
        for k in range(shards)
    )


def units(index: int, input: InputFile, options: ReadOptions, target_bytes: int) -> list[Unit]:
    """A shard of a dataset is one unit."""
    return [Unit(input=index, start=0, stop=1, bytes=input.bytes or UNKNOWN_BYTES)]


def read(scan: Scan) -> Iterator[DocumentBatch]:
    """Yield the documents of a shard.

    Raises:
        InputError: there is no such text column, or the library cannot read the shard.
        StorageError: the hub cannot be reached.
    """
    return documents_of(_tables(scan.input), scan)


def read_texts(
    input: InputFile, unit: Unit, options: ReadOptions, text_of: TextOf
) -> Iterator[DocumentBatch]:
    """Yield the documents of a shard whose text a function takes out of each row.

    Raises:
        InputError: it gives something else than a string or None; or as `read`.
    """
    name = options.text_column

    def texts() -> Iterator[pa.RecordBatch]:
        row = 0
        for table in _tables(input):
            found = list(map(text_of, table.to_pylist()))
            for n, text in enumerate(found, row):
                if not isinstance(text, str | None):
                    raise InputError(
                        f"the text of a row is of type {type(text).__name__}, not a string",
                        where=f"{input.path}, row {n:,}",
                        fix="let text_fn return the text, or None where there is none",
                    )
            row += len(found)
            yield table_of([{name: text} for text in found], name, input)

    return documents_of(texts(), Scan(input, unit, options))


def columns(input: InputFile, options: ReadOptions) -> ColumnKinds:
    """Return the columns of a shard's rows. Raises as `table_schema`."""
    found = next((table.schema for table in _tables(input)), pa.schema([]))
    return kinds_of(table_schema(found, input, options))


def _tables(input: InputFile) -> Iterator[pa.RecordBatch]:
    place = dict(parse_qsl(input.url.removeprefix("hf:"), keep_blank_values=True))
    dataset = _load(place["repository"], place["config"], place["split"], place["commit"])
    if int(dataset.num_shards) != int(place["shards"]):
        raise InputError(
            f"the dataset now has {dataset.num_shards} shards, not {place['shards']}",
            where=input.path,
            why="another version of the `datasets` library cuts it differently",
            fix="delete the output and run the command again",
        )
    shard = dataset.shard(num_shards=int(place["shards"]), index=int(place["shard"]))
    tables = iter(shard.with_format("arrow").iter(batch_size=ROWS))
    while True:
        with hub_errors(place["repository"], "dataset"):
            try:
                table = next(tables, None)
            except pa.ArrowInvalid as error:
                raise InputError(
                    "a file of the dataset is damaged", where=input.path, why=str(error)
                ) from error
        if table is None:
            return
        yield from table.combine_chunks().to_batches()


def _library(repository: str) -> Any:
    with needs("reading any dataset of the hub", where=f"--source hf:{repository}"):
        import datasets
    return datasets


@lru_cache(maxsize=4)  # each shard of a dataset asks again; a pinned commit never changes
def _load(repository: str, config: str, split: str, commit: str) -> Any:
    library = _library(repository)
    with hub_errors(repository, "dataset"):
        try:
            return library.load_dataset(
                repository, config or None, split=split, streaming=True, revision=commit
            )
        except FileNotFoundError as error:
            raise InputError(
                "the hub repository holds no dataset the library can read", where=repository
            ) from error
        except ValueError as error:  # no such config or split; the library's message lists them
            raise UsageError(
                "the dataset has no such config or split",
                where=f"hf:{repository}{':' + config if config else ''}, split {split}",
                why=said_by(error),
                fix="say --source hf:ORG/NAME:CONFIG --split SPLIT",
            ) from error
