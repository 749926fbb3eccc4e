"""`olm-export.json` of an exported model: what it was made of, and what was proved of it, by whom.

    claim     which export it is: a checkpoint's digest and every option that changes a byte
    receipt   the claim; size and sha256 of each file, sha256 of each tensor; what each reader found

It says no more than was done: what was not compared stands under `not_compared` with the reason.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from olm_data.bounded_json import MalformedJson, Size, decode, indented
from olm_data.errors import ValidationError

FORMAT, VERSION = "hf", 1
Dtype = Literal["bfloat16", "float16", "float32"]
Verify = Literal["auto", "files", "transformers"]
"""Who reads a folder before it is there."""


class ModelClaim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which export it is; two with the same claim hold the same files.

    Attributes:
        format: `hf`.
        checkpoint: digest of its manifest.
        dtype: of all weights.
        shard_bytes: of tensors in a file, at most.
        tied_head: a head that is the embedding table is written a second time.
        template: sha256 of the chat template; None: there is none.
        context: tokens of the longest text, `max_position_embeddings`.
    """

    format: str = FORMAT
    checkpoint: str
    dtype: Dtype
    shard_bytes: Size
    tied_head: bool
    template: str | None
    context: Size

    def encode(self) -> bytes:
        """Return the bytes of the file that claims a remote place."""
        return indented(self)


class FileProof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file: its size and sha256."""

    bytes: Size
    sha256: str


class LossProof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Loss of rows of the mixture, nats a token: ours packed, theirs document by document."""

    labels: Size
    ours: float
    theirs: float
    tolerance: float


class ModelProof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a reader computed of the folder, beside what we compute of the checkpoint, in fp32.

    Attributes:
        reader: library and version.
        model_class: that it made.
        lengths: tokens of the random prompts.
        longer_than_window: one is longer than the largest window; None: there is no window.
        longer_than_original_context: likewise of scaled rotary positions.
        largest_logit, largest_difference: over all prompts, absolute.
        tolerance: bound of the difference.
        greedy_tokens: ids that both chose alike; greedy_tie: it ended where two logits were equal.
        stops_at: ids at each of which generation ended, as `generation_config.json` says.
        loss: of rows of the mixture; None: not compared.
    """

    reader: str
    model_class: str
    lengths: tuple[int, ...]
    longer_than_window: bool | None
    longer_than_original_context: bool | None
    largest_logit: float
    largest_difference: float
    tolerance: float
    greedy_tokens: Size
    greedy_tie: bool
    stops_at: tuple[int, ...]
    loss: LossProof | None


class Verified(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was proved.

    Attributes:
        tensors_read_by: library that read every tensor back, and found the bytes written.
        tokenizer_read_by: libraries that gave the ids of the probe texts; () without a tokenizer.
        model: None: no other program computed anything.
        not_compared: what was not, and why.
    """

    tensors_read_by: str
    tokenizer_read_by: tuple[str, ...]
    model: ModelProof | None
    not_compared: tuple[str, ...]


class ModelReceipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file.

    Attributes:
        claim: which export it is.
        model_class: that readers make of the folder, `architectures` of `config.json`.
        parameters: of the model, a tied head counted once.
        step: of the checkpoint.
        lock: digest of the mixture, "" where the data came from none.
        datasets: digest of each dataset of the mixture.
        tokenizer: sha256 of `tokenizer.json`; None: there is none.
        probe: digest of the ids of the probe texts, as in the lock.
        files: all but this one, by name.
        tensors: sha256 of the bytes of each tensor, by name.
        verified: what was proved.
    """

    version: int = VERSION
    claim: ModelClaim
    model_class: str
    parameters: Size
    step: Size
    lock: str
    datasets: dict[str, str]
    tokenizer: str | None
    probe: str | None
    files: dict[str, FileProof]
    tensors: dict[str, str]
    verified: Verified

    COLUMNS: ClassVar = dict.fromkeys(
        ("version", "claim", "lock", "datasets", "probe", "tensors", "files")
    )  # digests of what lies in the folder: in the receipt

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return indented(self)

    @classmethod
    def decode(cls, data: bytes, where: str) -> ModelReceipt:
        """Return the receipt that bytes are.

        Raises:
            ValidationError: they are none, or of another version.
        """
        try:
            receipt = decode(data, cls)
            why = f"it is of version {receipt.version}" if receipt.version != VERSION else ""
        except MalformedJson as error:
            why = str(error)
        if why:
            raise ValidationError("this is not the receipt of an export", where=where, why=why)
        return receipt
