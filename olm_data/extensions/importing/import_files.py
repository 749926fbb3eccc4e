"""`olm-data import`: token files of dolma, OLMo-core, Megatron or datatrove become a dataset.

    files -> borders from sidecars (borders.py) -> one pass over each file (shard.py)
          -> token files in place: by name below the dataset's folder, else by hard link
          -> tokenizer.json -> manifest.json (last, conditional create)

Tokens are read once and never copied. Killed at any byte, the same command writes the same bytes
again.

Also: one token file of another project becomes a shard in place: read once, sidecars written
beside.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from olm_data import __version__
from olm_data.bounded_json import digest
from olm_data.counts import counted
from olm_data.dataset.docs import DOCS, DocsWriter, docs_schema
from olm_data.dataset.folder import refuse_dataset_folder
from olm_data.dataset.manifest import (
    MANIFEST,
    PLAN,
    InputInfo,
    Manifest,
    build_manifest,
    refuse_too_many,
)
from olm_data.dataset.options import ImportedOptions
from olm_data.dataset.plan import shard_name
from olm_data.dataset.record import (
    BLOCK_BYTES,
    RAW_TOKENS,
    FileInfo,
    ImportedFile,
    ShardRecord,
    stored_plan,
)
from olm_data.dataset.shard import ENDS
from olm_data.dataset.shard_writer import TokensSummary, publish_shard
from olm_data.dataset.tokenizer import TOKENIZER, TokenizerInfo
from olm_data.dataset.tools import PassedCount, Tools
from olm_data.errors import ConflictError, InputError, ResourceError, UsageError
from olm_data.extensions.importing.borders import (
    HEAD,
    Borders,
    IndexDefect,
    index_dtype,
    read_borders,
    tokenizer_of,
)
from olm_data.extensions.importing.token_files import (
    TokenFile,
    advice,
    copies,
    defect,
    find,
    looks_like,
    pieces,
    refuse,
)
from olm_data.runners.local import granted_cpus
from olm_data.sources.passed import refuse_passed, tally
from olm_data.storage.disk import fsync_path, io_errors, make_folder
from olm_data.storage.exclusive import exclusive
from olm_data.storage.names import refuse_escape
from olm_data.storage.output_paths import refuse_output
from olm_data.storage.store import Store, absolute, create_json
from olm_data.threads import in_order
from olm_data.tokenizer.tokenizer import TokenizerSpec


@dataclass(frozen=True)
class TokenFileContent:
    """What one pass over a token file finds.

    Attributes:
        tokens: size, digests and largest id of the file.
        ended: documents whose last token is the EOS id.
        hashes: uint64 [documents], XXH3-64 of the bytes of each document's tokens.
    """

    tokens: TokensSummary
    ended: int
    hashes: np.ndarray


def scan_tokens(
    file: TokenFile,
    ends: np.ndarray,
    dtype: np.dtype[Any],
    *,
    vocab_size: int,
    eos: int | None,
    scanned: bool,
    on_read: Callable[[int], None],
) -> TokenFileContent:
    """Read a token file once.

    Args:
        ends: uint64 [documents], where its documents end.
        vocab_size: every id must be below it.
        eos: id that should end each document, or None.
        scanned: no sidecar says where documents end, and so how wide a token is.
        on_read: called with the bytes of each piece.

    Raises:
        InputError: an id is outside the vocabulary, or the dtype is plainly another.
    """
    sha256, crc32, largest, ended, place = hashlib.sha256(), [], -1, 0, 0
    hashes = np.empty(len(ends), np.uint64)
    stops = (ends.astype(np.int64) * dtype.itemsize).tolist()
    number, rest = 0, xxhash.xxh3_64()
    for piece in pieces(file):
        on_read(len(piece))
        sha256.update(piece)
        view = memoryview(piece)
        crc32 += [
            f"{zlib.crc32(view[i : i + BLOCK_BYTES]):08x}" for i in range(0, len(view), BLOCK_BYTES)
        ]
        ids = np.frombuffer(piece, dtype)
        first = place // dtype.itemsize
        if wrong := defect(piece, dtype, vocab_size, first=first, width_known=not scanned):
            refuse(file, wrong, fix=advice(looks_like(piece, vocab_size)))
        largest = max(largest, int(ids.max()))
        first, start, stop = number, 0, place + len(piece)
        while number < len(stops) and stops[number] <= stop:
            rest.update(view[start : stops[number] - place])
            hashes[number] = rest.intdigest()
            rest.reset()
            start, number = stops[number] - place, number + 1
        rest.update(view[start:])
        if eos is not None:
            last = ends[first:number].astype(np.int64) - 1 - place // dtype.itemsize
            ended += int(np.count_nonzero(ids[last] == eos))
        place = stop
    info = FileInfo(file.bytes, sha256.hexdigest())
    tokens = TokensSummary(file=info, crc32="".join(crc32), largest=largest)
    return TokenFileContent(tokens, ended, hashes)


def write_sidecars(
    store: Store,
    name: str,
    number: int,
    plan: str,
    borders: Borders,
    content: TokenFileContent,
    not_ended: int,
) -> tuple[ShardRecord, str]:
    """Write the ends, document rows and commit record of a shard; return the record and its sha256.

    Args:
        store: of the dataset.
        name: of the shard.
        number: of the file among the inputs.
        plan: digest of the import.
        not_ended: documents whose last token is not the EOS id.
    """
    with store.staging() as staging:
        paths = {kind: staging / (name + kind) for kind in (ENDS, DOCS)}
        _write_docs(paths[DOCS], number, borders, content.hashes)
        record = publish_shard(
            store,
            name,
            paths,
            borders.ends.astype("<u8", copy=False),
            content.tokens,
            plan=plan,
            text_bytes=0,
            units=[ImportedFile(input=number, not_ended=not_ended)],
            dropped={"empty": borders.empty} if borders.empty else {},
        )
    return record, hashlib.sha256(record.encode()).hexdigest()


def _write_docs(path: Path, number: int, borders: Borders, hashes: np.ndarray) -> None:
    import pyarrow as pa

    count, columns = len(borders.ends), dict(borders.columns)
    ids = columns.pop("id", pa.nulls(count, pa.string()))
    schema = docs_schema(pa.schema([pa.field(n, c.type) for n, c in columns.items()]))
    table = pa.Table.from_arrays(
        [
            ids,
            pa.array(np.full(count, number, np.int32)),
            pa.array(borders.position.astype(np.int64)),
            pa.array(np.zeros(count, np.int64)),
            pa.array(hashes),
            *columns.values(),
        ],
        schema=schema,
    )
    with DocsWriter(path, schema) as writer:
        for rows in table.to_batches():
            writer.append(rows)


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """What an import made; its JSON is that of `--json`.

    Attributes:
        output: where the dataset is.
        files, documents, tokens: how much there is.
        linked: token files that were linked into the folder; the others lie below it.
        scanned: files without a sidecar, whose documents were found by EOS id.
        not_ended: documents that do not end in the EOS id.
        empty: documents without a token, which are left out.
        notes: what the user should know.
        passed_over: what lies in the folders named and is not imported.
        digest: of the dataset; None of a dry run.
    """

    output: str
    files: int
    documents: int
    tokens: int
    linked: int
    scanned: int
    not_ended: int
    empty: int
    notes: list[str]
    passed_over: dict[str, PassedCount]
    digest: str | None


def import_files(
    inputs: Sequence[str],
    output: str,
    tokenizer: TokenizerSpec,
    *,
    dtype: str | None = None,
    dry_run: bool = False,
    strict_inputs: bool = False,
    watch: Callable[[int, int], None] | None = None,
) -> Imported:
    """Make a dataset of token files where they lie.

    Args:
        inputs: files or folders; the order of the files is that of the shards.
        output: folder of the dataset, on the files' filesystem, or one that the files are below.
        tokenizer: the one that made the tokens, with its EOS and BOS rule.
        dtype: `uint16` or `uint32`, for files that do not say.
        dry_run: check everything, write nothing.
        strict_inputs: refuse where something in the folders named would not be imported.
        watch: called with (bytes read, bytes in all), from many threads, one at a time.

    Raises:
        InputError: a file, or what lies beside it, is not what it should be.
        UsageError: the dtype is missing, or the output holds files of somebody else.
        ConflictError: something else is there.
        ResourceError: the files cannot be linked.
    """
    refuse_output(output)
    found, beside = find(inputs, output)
    passed = tally(beside)
    if strict_inputs:
        refuse_passed(passed)
    kind = np.dtype(_dtype(found, dtype, tokenizer))
    store = Store(absolute(output))
    names = [_name_below(store, file) for file in found]
    job = _Import(
        store=store, files=found, passed=passed, names=names, tokenizer=tokenizer, dtype=kind
    )
    if all(name is None for name in names):  # else the folder is that of the files
        refuse_dataset_folder(store)
    if dry_run:
        return _import(job, watch, write=False)
    with exclusive(store) as lease:
        _refuse_other(job)
        return _import(job, watch, write=True, before_manifest=lease.check)


@dataclass(frozen=True, kw_only=True)
class _Import:
    """What is imported, and where to.

    Attributes:
        store: folder of the dataset.
        files: token files, a shard each, in order.
        passed: what lies beside them and is not imported.
        names: of each file its name in that folder; None where it must be linked.
        tokenizer, dtype: of all files.
    """

    store: Store
    files: list[TokenFile]
    passed: dict[str, PassedCount]
    names: list[str | None]
    tokenizer: TokenizerSpec
    dtype: np.dtype[Any]

    @cached_property
    def options(self) -> ImportedOptions:
        """Return the manifest's options."""
        return ImportedOptions(self.files[0].kind)

    @cached_property
    def plan(self) -> str:
        """Return the digest by which a rerun knows what it had begun."""
        files = zip(self.files, self.names, strict=True)
        return digest(
            {
                "imported": self.options.imported,
                "dtype": self.dtype.name,
                "tokenizer": msgspec.to_builtins(TokenizerInfo.of(self.tokenizer, "plain")),
                "files": [[_label(file, name), file.bytes] for file, name in files],
            }
        )


class _ImportedShard(NamedTuple):
    """A file as a shard; `record` is None of a dry run and of a file without a token."""

    borders: Borders
    not_ended: int
    sha256: str
    record: tuple[ShardRecord, str] | None


def _import(
    job: _Import,
    watch: Callable[[int, int], None] | None,
    *,
    write: bool,
    before_manifest: Callable[[], None] = lambda: None,
) -> Imported:
    found, tokenizer = job.files, job.tokenizer
    paths = (file.name for file in found)
    refuse_too_many(paths, len(found), 1, job.store.url(MANIFEST))
    total, lock = [0, sum(file.bytes for file in found)], threading.Lock()

    def count_bytes(count: int) -> None:
        with lock:
            total[0] += count
            if watch is not None:
                watch(total[0], total[1])

    def one(number: int) -> _ImportedShard:
        file, shard = found[number], shard_name(number)
        borders = read_borders(file, job.dtype, tokenizer.eos)
        if not len(borders.ends):
            return _ImportedShard(borders, 0, digest(""), None)
        content = scan_tokens(
            file,
            borders.ends,
            job.dtype,
            vocab_size=tokenizer.vocab_size,
            eos=tokenizer.eos,
            scanned=borders.scanned,
            on_read=count_bytes,
        )
        if tokenizer.eos is not None and not content.ended and len(borders.ends) > 1:
            refuse(
                file,
                f"none of its "
                f"{counted(len(borders.ends), 'document')} ends in the EOS id {tokenizer.eos}",
                fix="say which token does, --eos TOKEN, or that none does: --eos none",
            )
        not_ended = 0 if tokenizer.eos is None else len(borders.ends) - content.ended
        if not write:
            return _ImportedShard(borders, not_ended, content.tokens.file.sha256, None)
        if job.names[number] is None:
            _link(file, job.store, shard + RAW_TOKENS)
        record = write_sidecars(job.store, shard, number, job.plan, borders, content, not_ended)
        return _ImportedShard(borders, not_ended, content.tokens.file.sha256, record)

    shards = list(in_order(one, range(len(found)), granted_cpus()))
    before_manifest()
    return Imported(
        output=job.store.root,
        files=len(found),
        documents=sum(len(shard.borders.ends) for shard in shards),
        tokens=sum(file.bytes for file in found) // job.dtype.itemsize,
        linked=sum(name is None for name in job.names),
        scanned=sum(shard.borders.scanned for shard in shards),
        not_ended=sum(shard.not_ended for shard in shards),
        empty=sum(shard.borders.empty for shard in shards),
        notes=[note for shard in shards for note in shard.borders.notes]
        + copies(found, [shard.sha256 for shard in shards]),
        passed_over=job.passed,
        digest=str(_write_manifest(job, shards).digest) if write else None,
    )


def _write_manifest(job: _Import, shards: Sequence[_ImportedShard]) -> Manifest:
    """Write tokenizer.json and, last, the manifest."""
    store, tokenizer = job.store, job.tokenizer
    documents = [len(shard.borders.ends) + shard.borders.empty for shard in shards]
    empty = sum(shard.borders.empty for shard in shards)
    records = [shard.record for shard in shards if shard.record is not None]
    if not records:
        raise InputError("the files hold no token", where=store.root)
    inputs = zip(job.files, job.names, documents, shards, strict=True)
    manifest = build_manifest(
        tokenizer=TokenizerInfo.of(tokenizer, "plain"),
        dtype=job.dtype,
        options=job.options,
        plan=job.plan,
        inputs=[
            InputInfo(_label(file, name), file.bytes, "document", count, shard.sha256)
            for file, name, count, shard in inputs
        ],
        records=records,
        dropped={"empty": empty} if empty else {},
        documents_in=sum(documents),
        tools=Tools(
            versions={"olm": __version__}, tokenizer=tokenizer.name, passed_over=job.passed
        ),
        container="raw",
        files={shard_name(i): name for i, name in enumerate(job.names) if name is not None},
    )
    if not store.exists(TOKENIZER):
        store.create(TOKENIZER, tokenizer.json_bytes)
    create_json(store, MANIFEST, manifest.encode())
    return manifest


def _dtype(found: list[TokenFile], asked: str | None, tokenizer: TokenizerSpec) -> str:
    """Return the dtype of all files: what they say, else what was asked for."""
    said: dict[str, TokenFile] = {}
    for file in found:
        if file.kind == "megatron":
            try:
                head = file.store.read(file.beside(".idx"), 0, HEAD.size)
                said.setdefault(index_dtype(head).name, file)
            except FileNotFoundError:
                refuse(file, "there is no .idx beside it")
            except IndexDefect as error:
                refuse(file, f"its .idx: {error}")
        elif file.kind == "datatrove" and (known := tokenizer_of(file)):
            said.setdefault(known[1].name, file)
    if asked is not None:
        said.setdefault(asked, found[0])
    if len(said) > 1:
        one, other = list(said)[:2]
        refuse(said[other], f"its tokens are {other}, those of {said[one].name} {one}")
    if not said:
        likely = looks_like(next(pieces(found[0]), b""), tokenizer.vocab_size)
        raise UsageError(
            "these files do not say how wide their tokens are",
            where=found[0].url,
            why="the same bytes read with another dtype are other tokens",
            fix=f"say it, --dtype uint16 or --dtype uint32; {advice(likely)}",
        )
    dtype = next(iter(said))
    if dtype == "uint16" and tokenizer.vocab_size > 1 << 16:
        raise InputError(
            f"uint16 cannot hold the {tokenizer.vocab_size:,} ids of this tokenizer",
            where=found[0].url,
            fix="say the right --dtype, or the --tokenizer that made the files",
        )
    return dtype


def _name_below(store: Store, file: TokenFile) -> str | None:
    """Return the name of a file in the dataset's folder, None where it is not below it."""
    root, url = store.root, file.url
    if not store.remote and not file.store.remote:
        root, url = os.path.realpath(root), os.path.realpath(url)
    below = url.startswith(root.rstrip("/") + "/")
    return url[len(root.rstrip("/")) + 1 :] if below else None


def _label(file: TokenFile, name: str | None) -> str:
    """Return what the manifest calls an input: its name from a folder, never an absolute path."""
    label = name or file.name
    refuse_escape(label)
    return label


def _link(file: TokenFile, store: Store, name: str) -> None:
    """Give a token file a second name in the dataset's folder."""
    target, source = store.url(name), file.url
    fix = "put --output on the filesystem of the files, or in a folder that they are below"
    if store.remote or file.store.remote:
        raise UsageError("objects of a bucket cannot be linked", where=source, fix=fix)
    source = os.path.realpath(source)
    with io_errors(target, writing=True):
        make_folder(store.root)
        with suppress(FileNotFoundError):
            os.unlink(target)
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                raise
            raise ResourceError(
                f"the file cannot be linked into the dataset's folder: {error.strerror}",
                where=source,
                why="tokens are used where they are, and never copied",
                fix=fix,
            ) from error
        fsync_path(Path(store.root))


def _refuse_other(job: _Import) -> None:
    """Refuse an output that holds anything but what this very import may have begun."""
    store = job.store
    there = next((name for name in (MANIFEST, PLAN) if store.exists(name)), None)
    others = (shard_name(i) for i in range(len(job.files)))
    if there is None and any(stored_plan(store, name) not in (None, job.plan) for name in others):
        there = shard_name(0)
    if there is None and store.exists(TOKENIZER):
        there = TOKENIZER if store.read(TOKENIZER) != job.tokenizer.json_bytes else None
    if there is not None:
        raise ConflictError(
            "the output holds something else already",
            where=store.url(there),
            fix="choose another --output",
        )
