"""The job of a run as a file, `job.json` beside `plan.json`: so a worker needs storage only.

The file is not digested: it holds where the inputs are read (`url`), which may differ between two
runs that make the same bytes. It has a digest of its own.
"""

from __future__ import annotations

import json
from typing import Literal

import msgspec

from olm_data.bounded_json import MalformedJson, Size, decode, digest
from olm_data.dataset.inputs import InputFile, ReadOptions, SpecialPolicy
from olm_data.dataset.manifest import JOB
from olm_data.decoding import convert
from olm_data.errors import ValidationError
from olm_data.storage.store import Store, read_json
from olm_data.tokenizer.tokenizer import TokenizerSpec, spec_from_bytes


class TokenizerIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names a tokenizer beside the bytes of its `tokenizer.json`, as the job of a run keeps it."""

    name: str
    sha256: str
    probe_sha256: str
    eos_token: str | None
    bos_token: str | None

    @classmethod
    def of(cls, spec: TokenizerSpec) -> TokenizerIdentity:
        """Return what names a tokenizer."""
        return convert(spec, cls, from_attributes=True)

    def open(self, json_bytes: bytes) -> TokenizerSpec:
        """Return the tokenizer in these bytes, proved on this machine.

        Raises:
            ValidationError: the file is another one, or the library here reads it differently.
        """
        spec = spec_from_bytes(
            json_bytes,
            name=self.name,
            eos=self.eos_token or "none",
            bos=self.bos_token or "none",
        )
        if spec.sha256 != self.sha256:
            raise ValidationError(
                "this is not the tokenizer the run began with",
                where=self.name,
                fix="run the whole tokenize command again",
            )
        if spec.probe_sha256 != self.probe_sha256:
            raise ValidationError(
                "the tokenizers library of this machine gives other ids than the run began with",
                where=self.name,
                why="its shards would not fit the others",
                fix="install the same version of tokenizers everywhere",
            )
        return spec


class JobFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of `job.json`.

    Attributes:
        plan_file, plan_sha256, plan: name of the plan's file, sha256 of its bytes, its digest.
        packages: versions of the packages whose bytes reach the shards.
        inputs, read: what to read and how.
        tokenizer: of the `tokenizer.json` beside it, and its BOS and EOS rule.
        encoder: name of the encoder plug-in.
        routed: code points whose documents are encoded by the reference.
        special, holdout, shuffle: as the plan says: the policy, the bound below which a content
            hash (uint64) is held out, and the seed of the order of documents in a shard, or None.
        duplicates: `find` them in a first pass, which writes no shard; `drop` those that were
            found; or `keep` all documents.
        digest: of the canonical JSON of all of this without the key `digest`.
    """

    format: Literal["olm-job"] = "olm-job"
    version: Literal[1] = 1
    plan_file: str
    packages: dict[str, str]
    plan_sha256: str
    plan: str
    inputs: tuple[InputFile, ...]
    read: ReadOptions
    tokenizer: TokenizerIdentity
    encoder: str
    routed: tuple[tuple[Size, Size], ...]
    special: SpecialPolicy
    holdout: int
    single_writer: bool
    shuffle: int | None
    duplicates: Literal["keep", "find", "drop"]
    digest: str = ""

    def compute_digest(self) -> str:
        """Return the digest that the content should have."""
        content = msgspec.to_builtins(self)
        del content["digest"]
        return digest(content)

    def encode(self) -> bytes:
        """Return the bytes of `job.json`, with the digest of the content."""
        content = msgspec.structs.replace(self, digest=self.compute_digest())
        return json.dumps(msgspec.to_builtins(content), indent=1).encode() + b"\n"

    @classmethod
    def read_from(cls, store: Store, *, checked: bool = True) -> JobFile:
        """Read the job of a dataset.

        Args:
            checked: whether its digest has to be that of its content.

        Raises:
            FileNotFoundError: there is none.
            MalformedJson: it is none of this version, or was changed.
            ValidationError: as `read_json`.
        """
        job = decode(read_json(store, JOB), cls)
        if checked and job.digest != job.compute_digest():
            raise MalformedJson("its digest is not that of its content")
        return job
