"""Every parser of bytes that come from outside, as a function of bytes: for fuzzing.

    Workshop(folder): a small dataset, lock and job, made once -> seeds
    target.run(data): may only end, or raise an `OlmError` (usage, validation, input, ...)

A target writes the bytes where the parser reads them and looks at what comes out. Digests inside
JSON are made good first, or no change would get past them. Never: catches anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from fuzz import left_behind
from support.reading import resolve_source
from support.stand_in import parse_mixture
from support.tokenizing import make_dataset, write_jsonl

from olm_data.bounded_json import MalformedJson, canonical_json
from olm_data.bounded_json import digest as canonical_digest
from olm_data.config.strict_yaml import load
from olm_data.counts import parse_count, parse_share
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import decode_manifest
from olm_data.dataset.plan import Plan, parse_tasks
from olm_data.dataset.record import ShardRecord
from olm_data.dataset.shard import Shard
from olm_data.errors import OlmError
from olm_data.mixture.lock import UNDIGESTED, Lock
from olm_data.select.where import parse
from olm_data.sources import plan_units, read_units
from olm_data.storage.store import Store
from olm_data.tokenization.recipe import parse_budget
from olm_data.tokenization.stored_job import load_job
from olm_data.tokenizer.tokenizer import spec_from_bytes

LINES = [
    b'{"id": "a", "text": "one \\u00e9 \\ud83d\\ude00", "n": 1, "s": "x"}',
    b'{"text": "two", "n": null, "s": {"a": [1, 2.5e3]}}',
    b'{"text": ""}',
    b'{"text": 5, "id": 7}',
    b"{oops",
    b"",
    b'{"text": "caf\xe9"}',
    b'["text"]',
]
YAML = b"""version: 1
seed: 7
sequence_length: 16
packing: concat
sources:
  web: {data: ./web, max_epochs: 4}
  code: {data: s3://bucket/code, max_epochs: 1.5}
stages:
  - {name: main, tokens: 95K, weights: {web: 85, code: 15}}
  - {name: anneal, tokens: 5_000, tokens_from: {web: 2K, code: 3K}}
on_exhausted: error
"""
CONDITIONS = [
    b"score >= 3 and language == 'en'",
    b"not (a in [1, 2.5, 'x'] or `my column` is None) and flag",
    b"0.5 < score <= 3 or name not in ['a', \"b\"]",
]
SETTINGS = [b"0.1%", b"25", b"1/1000", b"100M", b"1.5B", b"3-7,9", b"95_000"]


@dataclass(frozen=True)
class Target:
    """One parser.

    Attributes:
        run: parses the bytes; raises nothing but `OlmError`.
        seeds: honest inputs.
    """

    run: Callable[[bytes], None]
    seeds: list[bytes]


class Workshop:
    """Makes honest inputs in a folder and holds the targets.

    Args:
        folder: an empty folder, on a fast disk.
        tokenizer: a small tokenizer.json.
    """

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        source = write_jsonl(folder / "source.jsonl", [f"document {k}" for k in range(5)])
        make_dataset([source], tokenizer, folder / "data")
        self.dataset = Dataset.open(str(folder / "data"))

    @cached_property
    def targets(self) -> dict[str, Target]:
        """All targets by name."""
        data = self.folder / "data"
        shard = {
            kind: (data / f"shard-00000{kind}").read_bytes()
            for kind in (".ends.npy", ".tokens.npy", ".docs.parquet", ".json")
        }
        return {
            "jsonl": self._source("a.jsonl", [b"\n".join(LINES), LINES[0] + b"\r\n" + LINES[1]]),
            "jsonl.zst": self._source(
                "b.jsonl.zst", [zstandard.ZstdCompressor().compress(b"\n".join(LINES))]
            ),
            "txt": self._source(
                "c.txt", [b"one\n\n two \r\n \n\xef\xbb\xbfthree\xff"], separator="blank-lines"
            ),
            "parquet": self._source("d.parquet", [self._table("parquet")]),
            "arrow": self._source("e.arrow", [self._table("stream"), self._table("file")]),
            "manifest": Target(self._manifest, [(data / "manifest.json").read_bytes()]),
            "record": Target(self._record, [shard[".json"]]),
            "plan": Target(self._plan, [(data / "plan.json").read_bytes()]),
            "job": Target(self._job, [(data / "job.json").read_bytes()]),
            "ends": Target(self._shard_file(".ends.npy"), [shard[".ends.npy"]]),
            "tokens": Target(self._shard_file(".tokens.npy"), [shard[".tokens.npy"]]),
            "docs": Target(self._shard_file(".docs.parquet"), [shard[".docs.parquet"]]),
            "tokenizer": Target(self._tokenizer, [self.tokenizer.read_bytes()]),
            "lock": Target(self._lock, [self._lock_seed()]),
            "yaml": Target(self._yaml, [YAML]),
            "where": Target(self._where, CONDITIONS),
            "settings": Target(self._settings, SETTINGS),
            **{name: Target(*made) for name, made in left_behind.targets(self.folder).items()},
            **self._checkpoint_targets(),
        }

    def _checkpoint_targets(self) -> dict[str, Target]:
        from fuzz.checkpoints import Checkpoints  # imports torch

        made = Checkpoints(self.folder / "checkpoints")
        return {
            f"checkpoint {name}": Target(made.run(file), [made.seed(file)])
            for name, file in (
                ("manifest", "manifest.json"),
                ("index", "model_and_optim/index.json"),
                ("state", "train.json"),
            )
        }

    def _source(self, name: str, seeds: list[bytes], **options: Any) -> Target:
        path = self.folder / name

        def run(data: bytes) -> None:
            path.write_bytes(data)
            keep = None if name.endswith(".txt") else ["n", "s"]
            with suppress(OlmError):
                plan = resolve_source([str(path)], keep=keep, **options)
                units = plan_units(0, plan.inputs[0], plan.options, 64)
                for batch in read_units(plan.inputs, units, plan.options):
                    left_out = len(batch.dropped) + sum(batch.skipped.values())
                    assert batch.rows_in == batch.documents + left_out
                    for k in range(batch.documents):
                        assert batch.text(k).strip()

        return Target(run, seeds)

    def _table(self, kind: str) -> bytes:
        table = pa.table(
            {"text": ["one", "two \u00e9", None, ""], "n": [1, 2, 3, 4], "s": list("abcd")}
        )
        sink = pa.BufferOutputStream()
        if kind == "parquet":
            pq.write_table(table, sink, row_group_size=2)
        else:
            new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
            with new(sink, table.schema) as writer:
                writer.write_table(table)
        return bytes(sink.getvalue())

    def _manifest(self, data: bytes) -> None:
        with suppress(OlmError):
            manifest = decode_manifest(_with_digest(data, ("digest", "tools")), "manifest.json")
            assert decode_manifest(manifest.encode(), "again").digest == manifest.digest

    def _record(self, data: bytes) -> None:
        folder = self.folder / "record"
        folder.mkdir(exist_ok=True)
        for kind in (".ends.npy", ".tokens.npy", ".docs.parquet"):
            name = f"shard-00000{kind}"
            (folder / name).write_bytes((self.folder / "data" / name).read_bytes())
        (folder / "shard-00000.json").write_bytes(data)
        with suppress(OlmError):
            shard = self.open_shard(folder, {"record": canonical_sha256(data)})
            assert isinstance(shard.record, ShardRecord)
            shard.read(0, shard.tokens.size)

    def _shard_file(self, kind: str) -> Callable[[bytes], None]:
        folder = self.folder / f"shard{kind}"

        def run(data: bytes) -> None:
            folder.mkdir(exist_ok=True)
            for other in (".ends.npy", ".tokens.npy", ".docs.parquet", ".json"):
                name = f"shard-00000{other}"
                if not (folder / name).exists():
                    (folder / name).write_bytes((self.folder / "data" / name).read_bytes())
            (folder / f"shard-00000{kind}").write_bytes(data)
            digests = {kind.split(".")[1]: canonical_sha256(data)}
            with suppress(OlmError):
                shard = self.open_shard(folder, digests)
                shard.read(0, shard.tokens.size)
                for number in range(len(shard.ends)):
                    shard.docs.row(number)

        return run

    def open_shard(self, folder: Path, digests: dict[str, str]) -> Shard:
        """Open the first shard in a folder, with other digests for some of its files."""
        manifest = self.dataset.manifest
        info = manifest.shards[0]
        return Shard(
            Store(folder),
            manifest,
            msgspec.structs.replace(info, sha256=msgspec.structs.replace(info.sha256, **digests)),
            verify="lazy",
        )

    def _plan(self, data: bytes) -> None:
        with suppress(MalformedJson):
            stored = Plan.decode((self.folder / "data" / "plan.json").read_bytes())
            stored.differences(Plan.decode(data))

    def _job(self, data: bytes) -> None:
        folder = self.folder / "job"
        folder.mkdir(exist_ok=True)
        for name in ("plan.json", "tokenizer.json"):
            (folder / name).write_bytes((self.folder / "data" / name).read_bytes())
        (folder / "job.json").write_bytes(data)
        with suppress(OlmError):
            load_job(str(folder))

    def _tokenizer(self, data: bytes) -> None:
        with suppress(OlmError):
            spec = spec_from_bytes(data, name="tokenizer.json")
            assert spec.vocab_size > 0

    def _lock(self, data: bytes) -> None:
        with suppress(OlmError):
            lock = Lock.decode(_with_digest(data, UNDIGESTED), "lock")
            lock.schedule()

    def _lock_seed(self) -> bytes:
        from support.stand_in import compiled

        path = self.folder / "mixture.lock.json"
        compiled(YAML.decode().replace("s3://bucket", ".")).write(str(path))
        return path.read_bytes()

    def _yaml(self, data: bytes) -> None:
        with suppress(OlmError):
            load(data, "file.yaml")
        with suppress(OlmError):
            parse_mixture(data)

    def _where(self, data: bytes) -> None:
        text = data.decode(errors="surrogateescape")
        with suppress(OlmError):
            parse(text)

    def _settings(self, data: bytes) -> None:
        text = data.decode(errors="surrogateescape")
        for read in (parse_budget, parse_count, parse_tasks, lambda t: parse_share(t, "--x")):
            with suppress(OlmError):
                read(text)


def canonical_sha256(data: bytes) -> str:
    """Return the sha256 of bytes, as manifests have it."""
    import hashlib

    return hashlib.sha256(data).hexdigest()


def _with_digest(data: bytes, undigested: tuple[str, ...]) -> bytes:
    """Return a JSON object with its `digest` made good; other bytes as they are."""
    try:
        value = msgspec.json.decode(data)
        body = {key: item for key, item in value.items() if key not in undigested}
        canonical_json(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, AttributeError, ValueError, TypeError):
        return data
    return msgspec.json.encode(value | {"digest": canonical_digest(body)})
