"""`olm-data export`: a dataset as the files of another project, whole or not at all.

    dataset -> Writer of the format -> files of a Draft -> counts compared -> committed, see
                                                           destination.py

`olm-export.json` in the output says of which dataset it is and how large each file is; with it a
second run of the same command does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import msgspec

from olm_data.bounded_json import MalformedJson, decode, indented
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import MANIFEST, VALIDATION
from olm_data.dataset.target import dataset_root, is_lock
from olm_data.decoding import convert
from olm_data.errors import UsageError, ValidationError, suggest
from olm_data.extensions.exporting.base import Counts, Writer
from olm_data.extensions.exporting.samples import HuggingFace, LitData, Mds
from olm_data.extensions.exporting.token_files import (
    Datatrove,
    Megatron,
    MegatronMerged,
    OlmoCoreFiles,
)
from olm_data.printing import Columns
from olm_data.storage.destination import (
    RECORD,
    Draft,
    LocalFolder,
    RemotePrefix,
    destination,
    in_the_way,
)
from olm_data.storage.disk import io_errors
from olm_data.storage.output_paths import refuse_output

FORMATS: dict[str, type[Writer]] = {
    "olmo-core": OlmoCoreFiles,
    "megatron": Megatron,
    "datatrove": Datatrove,
    "mds": Mds,
    "litdata": LitData,
    "hf": HuggingFace,
}
MERGED: dict[str, type[Writer]] = {"megatron": MegatronMerged}
"""Formats that can hold all shards in one set of files."""


class Claim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which export it is: all of the claim that stands in a prefix until the export is whole.

    Attributes:
        format: key of `FORMATS`.
        dataset: digest of the dataset.
        merged: all shards are in one set of files.
    """

    format: str
    dataset: str
    merged: bool


class _Written(Claim, frozen=True, kw_only=True):
    documents: int
    tokens: int
    linked: int
    lost: list[str]
    files: dict[str, int]


class Exported(_Written, frozen=True, kw_only=True):
    """What was written, or is to be; its JSON is that of `--json`, and `Receipt` that of the file.

    Attributes:
        status: `written`, `already there` or `would write`.
        output: the folder or prefix.
        format, dataset, merged: as in `Claim`.
        documents, tokens: counted in what was written.
        linked: shards whose tokens are hard links, and no copy.
        lost: sentences about what the files do not hold.
        files: size in bytes of each file; {} for `would write`.
    """

    status: str
    output: str

    COLUMNS: ClassVar = {"files": Columns(most=5)}


class Receipt(_Written, frozen=True, kw_only=True):
    """All of `olm-export.json`; fields as in `Exported`."""

    version: int = 1


def export(
    target: str,
    form: str,
    output: str,
    *,
    merge: bool = False,
    dry_run: bool = False,
    watch: Callable[[int, int], None] = lambda tokens, total: None,
) -> Exported:
    """Write a dataset in the format of another project.

    Args:
        target: folder or URL of the dataset.
        form: key of `FORMATS`.
        output: local folder to make, or `s3://bucket/prefix`.
        merge: put all shards into one set of files.
        dry_run: look only.
        watch: called with the tokens written and those of the dataset, after each shard.

    Raises:
        UsageError: an unknown format, one that cannot be merged, a lock, or an output that is no
            folder of its own; or the dataset says which tokens are trained.
        InputError: there is no dataset, or the format cannot hold it.
        ConflictError: the output holds something else.
        ValidationError: the dataset is damaged, or what was written is not all of it.
        ResourceError: the disk is full, or the folder may not be written.
        StorageError: remote storage fails.
    """
    kind = _writer_of(target, form, output, merge)
    dataset, place = Dataset.open(dataset_root(target)), destination(output)
    if dataset.manifest.trained is not None:
        raise UsageError(
            "this dataset says which tokens are trained, and no format to export to can",
            where=target,
            why="its reader would train on what users said, and on what tools answered",
            fix="train from it here; or give other programs the chats themselves",
        )
    lost = _lost(dataset, kind)
    claim = Claim(format=form, dataset=dataset.digest, merged=merge)
    if (done := _there(place, claim)) is not None:
        return done
    if dry_run:
        linked = len(dataset.manifest.shards) if kind.links(dataset) and not place.remote else 0
        return Exported(
            status="would write",
            output=output,
            documents=dataset.documents,
            tokens=dataset.tokens,
            linked=linked,
            lost=lost,
            files={},
            **msgspec.structs.asdict(claim),
        )
    with place.draft(indented(claim)) as draft, io_errors(output, writing=True):
        counts = _write(dataset, kind(dataset, draft.folder), draft, watch)
        result = Exported(
            status="written",
            output=output,
            documents=counts.documents,
            tokens=counts.tokens,
            linked=0 if place.remote else counts.linked,
            lost=[*lost, *_mended(counts)],
            files=dict(sorted(draft.sizes.items())),
            **msgspec.structs.asdict(claim),
        )
        draft.commit(indented(convert(result, Receipt, from_attributes=True)))
    return result


def _writer_of(target: str, form: str, output: str, merge: bool) -> type[Writer]:
    refuse_output(output)
    if form not in FORMATS:
        raise UsageError(
            f"unknown format {form!r}", where=f"--to {form}", fix=suggest(form, FORMATS)
        )
    if merge and form not in MERGED:
        raise UsageError(
            f"--merge has no effect on {form}: its readers take the whole folder",
            where=f"--to {form}",
            fix="leave it out",
        )
    if is_lock(target):
        raise UsageError(
            "a lock is not a dataset", where=target, fix="export each of its datasets by its folder"
        )
    return MERGED[form] if merge else FORMATS[form]


def _there(place: LocalFolder | RemotePrefix, claim: Claim) -> Exported | None:
    """Return what an earlier run of the same command wrote; None where the output is free.

    Raises:
        ConflictError: it holds something else, or files of that run have changed in size.
    """
    data = place.receipt()
    if data is None:
        return None
    try:
        found = decode(data, Receipt)
    except MalformedJson as error:
        raise in_the_way(place.output, f"its {RECORD} cannot be read") from error
    if (found.format, found.merged, found.dataset) != (claim.format, claim.merged, claim.dataset):
        other = f"a {found.format} export of dataset {found.dataset[:12]}"
        asked = f"{claim.format} of {claim.dataset[:12]}"
        raise in_the_way(place.output, f"it is {other}; asked is {asked}")
    for name, size in found.files.items():
        if place.size(name) != size:
            raise in_the_way(place.output, f"{name} of an earlier export is not as it was written")
    fields = msgspec.structs.asdict(found)
    del fields["version"]
    return Exported(status="already there", output=place.output, **fields)


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


def _write(
    dataset: Dataset, writer: Writer, draft: Draft, watch: Callable[[int, int], None]
) -> Counts:
    for index in range(len(dataset.manifest.shards)):
        writer.add(index, dataset.open_shard(index))
        if not writer.whole:
            draft.settle()
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
    draft.settle()
    return counts
