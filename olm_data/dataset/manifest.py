"""The manifest of a dataset: what every shard, input and total is, under one digest.

    commit records -> build_manifest -> manifest.json (written last, conditional create)
    manifest.json  -> read_manifest  -> Manifest, its digest checked

The `digest` is the sha256 of the manifest's canonical JSON without the keys `digest` and `tools`;
it names the dataset everywhere else. docs/reference/format.md is the specification.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np

from olm_data.bounded_json import MalformedJson, Size, decode_own
from olm_data.dataset.inputs import Container, RecordOptions
from olm_data.dataset.options import ImportedOptions, Options, Split, decode_options
from olm_data.dataset.record import (
    CONTAINERS,
    WIDTHS,
    ShardRecord,
    documents_bound,
    stream_windows,
    tokens_header,
    tokens_suffix,
)
from olm_data.dataset.tokenizer import TokenizerInfo
from olm_data.dataset.tools import Tools
from olm_data.errors import InputError, ValidationError, printable, suggest
from olm_data.path_kinds import kind_of, nearest, wrong_kind
from olm_data.regular_files import MAX_DOCUMENT
from olm_data.storage.names import refuse_escape
from olm_data.storage.store import Store, read_json, refuse_unreadable

MANIFEST, PLAN, VALIDATION = "manifest.json", "plan.json", "validation"
JOB, EXCLUDED, EVAL_TEXTS = "job.json", "exclude-ids.npy", "evaluation-texts.txt"
MAX_IDS = 2 << 30
"""Bytes of the ids to leave out: 16 each."""

VERSIONS = "manifests"
"""Sub-folder of the manifests that additions have replaced, each under its digest."""

FORMAT, VERSION = "olm-dataset", 1
WITH_LABELS = 2
"""Version of a dataset that says which of its tokens are trained."""

_SHARD_NAMES = re.compile(r"(?:shard-[0-9]{5,}\n)*")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")

Digest = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]


class InputInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One input: `documents` counts everything read from it, dropped documents included."""

    path: str
    bytes: Size
    position: str
    documents: Size
    sha256: str


class ShardDigests(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The sha256 of each file of a shard; `digests["docs"]` is `digests.docs`."""

    tokens: Digest
    ends: Digest
    docs: Digest
    record: Digest
    labels: Digest | msgspec.UnsetType = msgspec.UNSET

    def __getitem__(self, kind: str) -> str:
        return str(getattr(self, kind))


class ShardInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One shard: counts, and the sha256 of its `tokens`, `ends`, `docs` and `record` files.

    `file` is the name of its token file, below the dataset's folder, where that is another's and
    is used in place. `runs` and `trained` are as in `ShardRecord`; without them all is trained.
    """

    name: str
    tokens: Size
    documents: Size
    text_bytes: Size
    max_token_id: Size
    sha256: ShardDigests
    file: str | msgspec.UnsetType = msgspec.UNSET
    runs: Size | msgspec.UnsetType = msgspec.UNSET
    trained: Size | msgspec.UnsetType = msgspec.UNSET


class Totals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sums over all shards; `documents_in` = documents + dropped + sent to another split.

    `trained` only where a shard has labels.
    """

    tokens: Size
    documents: Size
    text_bytes: Size
    documents_in: Size
    other_split: int
    trained: Size | msgspec.UnsetType = msgspec.UNSET


class Addition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Inputs that were added to a dataset after it was first written.

    `parent` is the digest of the version they were added to, `plan` that of the plan that made
    their shards, `first_shard` and `first_input` are where they begin (shards by the number in
    their name), `options` is how the inputs were read.
    """

    parent: str
    plan: str
    first_shard: Size
    first_input: Size
    options: RecordOptions


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of `manifest.json`.

    `stored_options` are the options as canonical JSON: one that a later release has added counts
    in the digest, too.
    """

    format: str
    version: int
    container: Container
    dtype: str
    tokenizer: TokenizerInfo
    stored_options: msgspec.Raw = msgspec.field(name="options")
    plan: str
    inputs: list[InputInfo]
    shards: list[ShardInfo]
    totals: Totals
    dropped: dict[str, Size]
    max_documents_in: dict[str, Size]
    added: list[Addition] | msgspec.UnsetType = msgspec.UNSET
    digest: str | msgspec.UnsetType = msgspec.UNSET
    stored_tools: dict[str, str] | msgspec.UnsetType = msgspec.field(
        name="tools", default=msgspec.UNSET
    )

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "stored_options", _sorted(bytes(self.stored_options)))

    def spelled(self) -> tuple[bytes, bytes]:
        """Return the canonical JSON without `digest` and `tools`, and the JSON of these two."""
        body = msgspec.structs.replace(self, digest=msgspec.UNSET, stored_tools=msgspec.UNSET)
        rest = {"digest": self.digest, "tools": self.stored_tools}
        kept = {name: value for name, value in rest.items() if value is not msgspec.UNSET}
        return msgspec.json.encode(body, order="sorted"), msgspec.json.encode(kept)

    def compute_digest(self) -> str:
        """Return the sha256 of the canonical JSON without `digest` and `tools`."""
        return hashlib.sha256(self.spelled()[0]).hexdigest()

    def encode(self) -> bytes:
        """Return the bytes of `manifest.json`."""
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1) + b"\n"

    @property
    def options(self) -> Options | ImportedOptions:
        """What decided the bytes of the dataset beside its inputs and its tokenizer."""
        return _options(bytes(self.stored_options))

    @property
    def tokenized(self) -> Options | None:
        """The options of a dataset that `tokenize` made; None where it was imported."""
        options = self.options
        return options if isinstance(options, Options) else None

    @property
    def split(self) -> Split | None:
        """Which split this is: `train` has plans and accounts; None where it was imported."""
        options = self.tokenized
        return None if options is None else options.split

    @property
    def tools(self) -> Tools:
        """What made it, and what was counted beside; not digested."""
        return Tools.of(self.stored_tools or {})

    @property
    def trained(self) -> int | None:
        """How many tokens are trained where not all are meant to be; None: all are."""
        return None if self.totals.trained is msgspec.UNSET else self.totals.trained

    @property
    def additions(self) -> list[Addition]:
        """What was added to the dataset, in order; [] for a dataset made in one run."""
        return self.added or []

    def plan_of(self, shard: str) -> str:
        """Return the digest of the plan that made the shard of this name."""
        number = int(shard.removeprefix("shard-"))
        plans = [addition.plan for addition in self.additions if addition.first_shard <= number]
        return plans[-1] if plans else self.plan

    def tokens_name(self, info: ShardInfo) -> str:
        """Return the name of a shard's token file in the dataset's folder."""
        return info.file or info.name + tokens_suffix(self.container)

    def tokens_bytes(self, info: ShardInfo) -> int:
        """Return the exact size of a shard's token file."""
        return tokens_header(self.container) + info.tokens * np.dtype(self.dtype).itemsize

    def documents_bound(self, width: int) -> int:
        """Return a bound on the documents that a window of `width` tokens can touch."""
        return documents_bound(self.max_documents_in, width)


@lru_cache(maxsize=64)  # the sources of a mixture were mostly read alike
def _sorted(options: bytes) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(options), order="sorted"))


@lru_cache(maxsize=64)
def _options(options: bytes) -> Options | ImportedOptions:
    return decode_options(msgspec.Raw(options))


def build_manifest(
    *,
    tokenizer: TokenizerInfo,
    dtype: np.dtype[Any],
    options: Options | ImportedOptions,
    plan: str,
    inputs: Sequence[InputInfo],
    records: Sequence[tuple[ShardRecord, str]],
    dropped: dict[str, int],
    documents_in: int,
    tools: Tools,
    added: Sequence[Addition] = (),
    container: Container = "npy",
    files: Mapping[str, str] | None = None,
) -> Manifest:
    """Assemble a manifest from the commit records of all shard tasks, in task order.

    Args:
        records: (record, sha256 of the record's file) of each task; empty shards are left out.
        documents_in: documents read from all inputs, dropped ones included.
        added: what was added since the dataset was first written.
        container: whether the tokens have a NumPy header.
        files: names of token files that are used in place, by shard; the others are the shards'.
    """
    full = [(record, sha) for record, sha in records if record.tokens]
    documents = sum(record.documents for record, _ in full)
    trained = _trained([(record.tokens, record.trained) for record, _ in full])
    manifest = Manifest(
        format=FORMAT,
        version=VERSION if trained is msgspec.UNSET else WITH_LABELS,
        container=container,
        dtype=np.dtype(dtype).name,
        tokenizer=tokenizer,
        stored_options=msgspec.Raw(msgspec.json.encode(options)),
        plan=plan,
        inputs=list(inputs),
        shards=[
            ShardInfo(
                name=record.name,
                tokens=record.tokens,
                documents=record.documents,
                text_bytes=record.text_bytes,
                max_token_id=record.max_token_id,
                sha256=ShardDigests(
                    **{kind: info.sha256 for kind, info in record.files.items()}, record=sha
                ),
                file=(files or {}).get(record.name, msgspec.UNSET),
                runs=record.runs,
                trained=record.trained,
            )
            for record, sha in full
        ],
        totals=Totals(
            tokens=sum(record.tokens for record, _ in full),
            documents=documents,
            text_bytes=sum(record.text_bytes for record, _ in full),
            documents_in=documents_in,
            other_split=documents_in - documents - sum(dropped.values()),
            trained=trained,
        ),
        dropped=dict(sorted(dropped.items())),
        max_documents_in=stream_windows(
            [(record.tokens, record.documents, record.windows) for record, _ in full]
        ),
        added=list(added) or msgspec.UNSET,
        stored_tools=tools.stored(),
    )
    return msgspec.structs.replace(manifest, digest=manifest.compute_digest())


def _trained(
    shards: Iterable[tuple[int, int | msgspec.UnsetType]],
) -> int | msgspec.UnsetType:
    """Return the tokens trained of (tokens, trained) of shards; UNSET where none has labels."""
    found = list(shards)
    if all(trained is msgspec.UNSET for _, trained in found):
        return msgspec.UNSET
    return sum(tokens if trained is msgspec.UNSET else trained for tokens, trained in found)


def read_manifest(store: Store, digest: str | None = None, *, or_newest: bool = False) -> Manifest:
    """Read and check `manifest.json`, or the manifest of an older version.

    Args:
        digest: of the version that is wanted; None for the newest.
        or_newest: return the newest, too, where there is no version of that digest.

    Raises:
        InputError: there is no dataset at this place, it is unfinished, or it has no such version.
        ValidationError: malformed, edited, of another version, or naming files outside the folder.
    """
    if not store.remote and os.path.exists(store.root) and not os.path.isdir(store.root):
        raise wrong_kind(store.root, kind_of(store.root) or "file", "dataset")
    try:
        newest = _read(store, MANIFEST, digest)
    except (FileNotFoundError, NotADirectoryError) as error:
        if store.exists(PLAN):
            raise InputError(
                "this dataset is unfinished: it has a plan but no manifest yet",
                where=store.root,
                fix="run the same olm-data tokenize command again; it continues where it stopped",
            ) from error
        kind = kind_of(store.root)
        if kind not in (None, "folder", "empty folder", "dataset"):
            raise wrong_kind(store.root, str(kind), "dataset") from error
        raise InputError(
            "there is no dataset here (no manifest.json)",
            where=store.root,
            fix=nearest(
                store.root,
                "check the path, or make one: olm-data tokenize INPUT --tokenizer FILE "
                f"--output {store.root if kind is None else 'A-NEW-FOLDER'}",
            ),
        ) from error
    if digest is None or digest == newest.digest:
        return newest
    if or_newest and digest not in [addition.parent for addition in newest.additions]:
        return newest
    name = version_name(digest)
    try:
        found = _read(store, name, digest)
    except (FileNotFoundError, NotADirectoryError) as error:
        known = [str(newest.digest), *(item.parent for item in reversed(newest.additions))]
        raise InputError(
            "the dataset has no version of this digest",
            where=f"{store.root}, {digest}",
            fix=f"its versions, the newest first: {', '.join(known)}",
        ) from error
    if found.digest != digest:
        raise ValidationError(
            "this is the manifest of another version than its name says", where=store.url(name)
        )
    return found


def _read(store: Store, name: str, digest: str | None) -> Manifest:
    try:
        data = read_json(store, name)
    except MalformedJson as error:
        raise _malformed(error, store.url(name)) from None
    return decode_manifest(data, store.url(name), digest)


def refuse_too_many(paths: Iterable[str], shards: int, inputs_of_a_task: int, where: str) -> None:
    """Refuse, before work, what has a manifest or a commit record that nobody could read.

    Raises:
        InputError: there are too many inputs or shards.
    """
    manifest = sum(len(path.encode(errors="replace")) + 256 for path in paths) + 512 * shards
    refuse_unreadable(max(manifest, 640 * inputs_of_a_task), MAX_DOCUMENT, where)


def version_name(digest: str) -> str:
    """Return where the manifest of a version that an addition replaced is kept."""
    return f"{VERSIONS}/{digest}.json"


def decode_manifest(data: bytes, url: str, digest: str | None = None) -> Manifest:
    """Check the bytes of a manifest.

    Args:
        url: where they lie.
        digest: of the version that is wanted, where it is known.

    Raises:
        ValidationError: malformed, edited, of another version, or naming files outside the folder.
    """
    try:
        manifest, found = decode_own(data, Manifest, Manifest.spelled, digest)
    except MalformedJson as error:
        raise _malformed(error, url) from None
    _check_manifest(manifest, found, url)
    return manifest


def _malformed(error: MalformedJson, url: str) -> ValidationError:
    return ValidationError(
        f"the manifest is malformed: {error}",
        where=url,
        fix="restore it from a copy, or run olm-data tokenize into a new output",
    )


def _check_manifest(manifest: Manifest, digest: str, url: str) -> None:
    def refuse(what: str, fix: str) -> None:
        raise ValidationError(what, where=url, fix=fix)

    restore = "restore the file from a copy, or tokenise the inputs again into a new output"
    if manifest.format != FORMAT or manifest.version not in (VERSION, WITH_LABELS):
        refuse(
            f"this is {manifest.format} version {manifest.version}; "
            f"this release reads {FORMAT} versions {VERSION} and {WITH_LABELS}",
            "use the release that wrote it, or tokenise again",
        )
    if manifest.digest != digest:
        refuse("the manifest was changed after it was written: its digest does not match", restore)
    if manifest.container not in CONTAINERS or manifest.dtype not in ("uint16", "uint32"):
        refuse(
            f"container {manifest.container!r} with dtype {manifest.dtype!r} is not known; "
            + suggest(manifest.dtype, ("uint16", "uint32")),
            restore,
        )
    names = [shard.name for shard in manifest.shards]
    if not _SHARD_NAMES.fullmatch("\n".join([*names, ""])):
        refuse("a shard's name is not of the form shard-00000", restore)
    for file in [shard.file for shard in manifest.shards if shard.file]:
        refuse_escape(file)
    for addition in manifest.additions:
        if not _DIGEST.match(addition.parent):
            refuse(f"{printable(addition.parent)!r} is not the digest of a version", restore)
    if not manifest.max_documents_in.keys() <= WIDTHS:
        refuse("the windows of documents are not those that olm-data counts", restore)
    try:
        _ = manifest.options
    except ValueError as error:
        refuse(f"an option of the manifest cannot be: {printable(str(error))[:200]}", restore)
    totals = manifest.totals
    if (totals.tokens, totals.documents) != (
        sum([s.tokens for s in manifest.shards]),
        sum([s.documents for s in manifest.shards]),
    ):
        refuse("the totals are not the sums over the shards", restore)
    labels = [(s.sha256.labels, s.runs, s.trained) for s in manifest.shards]
    if any(0 < each.count(msgspec.UNSET) < 3 for each in labels) or totals.trained != _trained(
        [(s.tokens, s.trained) for s in manifest.shards]
    ):
        refuse("what it says of trained tokens does not go together", restore)
