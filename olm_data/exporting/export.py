"""`olm-data export`: a dataset as the files of another project, whole or not at all.

    dataset -> .NAME.exporting/ beside the output -> counts compared, fsync -> renamed to the output

`olm-export.json` in the output says of which dataset it is and how large each file is; with it a
second run of the same command does nothing. Never: write into a folder that holds anything, or
print a success before documents and tokens have been counted again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import MANIFEST, VALIDATION
from olm_data.errors import ConflictError, UsageError, ValidationError, suggest
from olm_data.exporting.base import Counts, Writer
from olm_data.exporting.datatrove import Datatrove
from olm_data.exporting.hf import HuggingFace
from olm_data.exporting.mds import Mds
from olm_data.exporting.megatron import Megatron
from olm_data.exporting.olmo_core import OlmoCore
from olm_data.storage.disk import (
    fsync_directory,
    io_errors,
    lock_file,
    make_folder,
    write_durable,
)
from olm_data.storage.store import is_remote
from olm_data.target import dataset_root, is_lock

RECORD = "olm-export.json"
FORMATS: dict[str, type[Writer]] = {
    "olmo-core": OlmoCore,
    "megatron": Megatron,
    "datatrove": Datatrove,
    "mds": Mds,
    "hf": HuggingFace,
}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, or is to be.

    Attributes:
        status: `written`, `already there` or `would write`.
        output: the folder.
        format: key of `FORMATS`.
        dataset: digest of the dataset.
        documents, tokens: counted in what was written.
        linked: shards whose tokens are hard links, and no copy.
        lost: sentences about what the files do not hold.
        files: size in bytes of each file; {} for `would write`.
    """

    status: str
    output: str
    format: str
    dataset: str
    documents: int
    tokens: int
    linked: int
    lost: list[str]
    files: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


def export(
    target: str,
    form: str,
    output: str,
    *,
    dry_run: bool = False,
    watch: Callable[[int, int], None] = lambda tokens, total: None,
) -> Exported:
    """Write a dataset in the format of another project.

    Args:
        target: folder or URL of the dataset.
        form: key of `FORMATS`.
        output: local folder to make.
        dry_run: look only.
        watch: called with the tokens written and those of the dataset, after each shard.

    Raises:
        UsageError: an unknown format, a lock, or an output that is not a local folder.
        InputError: there is no dataset, or the format cannot hold it.
        ConflictError: the output holds something else.
        ValidationError: the dataset is damaged, or what was written is not all of it.
        ResourceError: the disk is full, or the folder may not be written.
    """
    _check_arguments(target, form, output)
    dataset = Dataset.open(dataset_root(target))
    place, kind = Path(output.removeprefix("file://")), FORMATS[form]
    lost = _lost(dataset, kind)
    if (done := _there(place, form, dataset)) is not None:
        return done
    if dry_run:
        linked = len(dataset.manifest.shards) if kind.links(dataset) else 0
        return Exported(
            status="would write",
            output=output,
            format=form,
            dataset=dataset.digest,
            documents=dataset.documents,
            tokens=dataset.tokens,
            linked=linked,
            lost=lost,
            files={},
        )
    with _staging(place) as staging, io_errors(output, writing=True):
        counts = _write(dataset, kind(dataset, staging), watch)
        result = Exported(
            status="written",
            output=output,
            format=form,
            dataset=dataset.digest,
            documents=counts.documents,
            tokens=counts.tokens,
            linked=counts.linked,
            lost=[*lost, *_mended(counts)],
            files=_make_durable(staging),
        )
        record = result.to_json() | {"version": 1}
        del record["status"], record["output"]
        write_durable(staging / RECORD, json.dumps(record, indent=1).encode() + b"\n")
        fsync_directory(staging)
        _refuse_filled(place)
        os.rename(staging, place)  # an empty folder is replaced; any other is refused by the kernel
        fsync_directory(place.absolute().parent)
    return result


def _check_arguments(target: str, form: str, output: str) -> None:
    if form not in FORMATS:
        raise UsageError(
            f"unknown format {form!r}", where=f"--to {form}", fix=suggest(form, FORMATS)
        )
    if is_lock(target):
        raise UsageError(
            "a lock is no dataset", where=target, fix="export each of its datasets by its folder"
        )
    if is_remote(output):
        raise UsageError(
            "exports are written to local folders",
            where=f"--output {output}",
            why="the files appear there at once or not at all, which a bucket cannot do",
            fix="export to a local folder, then copy it with your storage's own tool",
        )


def _there(place: Path, form: str, dataset: Dataset) -> Exported | None:
    """Return what an earlier run of the same command wrote; None where the output is free.

    Raises:
        ConflictError: it holds something else, or files of that run have changed in size.
    """
    path = place / RECORD
    with io_errors(str(path)):
        if not path.exists():
            _refuse_filled(place)
            return None
        try:
            record = json.loads(path.read_bytes())
            del record["version"]
            done = Exported(status="already there", output=str(place), **record)
        except (ValueError, TypeError, KeyError) as error:
            raise _in_the_way(place, "its olm-export.json cannot be read") from error
        if (done.format, done.dataset) != (form, dataset.digest):
            other = f"a {done.format} export of dataset {done.dataset[:12]}"
            raise _in_the_way(place, f"it is {other}; asked is {form} of {dataset.digest[:12]}")
        for name, size in done.files.items():
            file = place / name
            if not file.is_file() or file.stat().st_size != size:
                raise _in_the_way(place, f"{name} of an earlier export is not as it was written")
    return done


def _refuse_filled(place: Path) -> None:
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise _in_the_way(place, "the output is not empty")


def _in_the_way(place: Path, why: str) -> ConflictError:
    return ConflictError(
        "the output holds something else",
        where=str(place),
        why=why,
        fix="choose another --output, or remove that folder",
    )


def _lost(dataset: Dataset, kind: type[Writer]) -> list[str]:
    said = kind.lost(dataset)
    said.append("not in it: tokenizer, sizes and hashes of the texts, checksums of the tokens")
    if dataset.store.exists(f"{VALIDATION}/{MANIFEST}"):
        said.insert(0, f"not in it: the held-out documents; export {dataset.store.root}/validation")
    return said


def _mended(counts: Counts) -> list[str]:
    said = []
    if counts.without_id:
        said.append(f"{counts.without_id:,} documents have no id: it is the empty string there")
    if counts.broken_names:
        said.append(
            f"{counts.broken_names:,} ids or paths held line breaks: written as \\n and \\r"
        )
    return said


def _write(dataset: Dataset, writer: Writer, watch: Callable[[int, int], None]) -> Counts:
    for index in range(len(dataset.manifest.shards)):
        writer.add(index, dataset.open_shard(index))
        watch(int(dataset.token_ends[index]), dataset.tokens)
    writer.finish()
    counts = writer.counts
    if (counts.documents, counts.tokens) != (dataset.documents, dataset.tokens):
        raise ValidationError(
            f"{counts.documents:,} documents with {counts.tokens:,} tokens were written, not "
            f"{dataset.documents:,} with {dataset.tokens:,}",
            where=dataset.store.root,
            fix="olm-data verify the dataset",
        )
    return counts


def _make_durable(folder: Path) -> dict[str, int]:
    """Wait until all files are on the disk; return their sizes by name."""
    sizes = {}
    for path in sorted(folder.iterdir()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            sizes[path.name] = os.fstat(file.fileno()).st_size
    return sizes


@contextmanager
def _staging(place: Path) -> Iterator[Path]:
    """Yield an empty folder beside `place`, ours alone; removed at the end, whatever happens.

    Raises:
        ConflictError: another process exports to the same place.
    """
    parent, name = place.absolute().parent, place.absolute().name
    lock, folder = parent / f".{name}.exporting.lock", parent / f".{name}.exporting"
    with io_errors(str(place), writing=True):
        make_folder(str(parent))
        handle = lock_file(str(lock))
    try:
        shutil.rmtree(folder, ignore_errors=True)  # of a killed run
        with io_errors(str(place), writing=True):
            os.mkdir(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.unlink(lock)
        os.close(handle)
