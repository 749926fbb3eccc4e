"""One export, before anything is written: options, family, and every tensor that it will hold.

    checkpoint, options -> Job -> claim, config.json, tokenizer, files and their tensors | refused

Tensors are read when they are asked for, the rows of one at a time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cached_property

import msgspec
import torch
from torch import Tensor

from olm_data.bounded_json import JsonObject, decode_object
from olm_data.errors import UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.model_receipt import Dtype, ModelClaim, Verify
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.manifest import LOCK, TOKENIZER
from olm_train.checkpoint.tensors import Box, read_rows
from olm_train.checkpoint.text_rules import CHAT_TEMPLATE
from olm_train.extensions.hf.model_format import known_tokenizer
from olm_train.extensions.hf.table import Family, family_of_config
from olm_train.extensions.hf.tensors import TensorMap, TensorPart
from olm_train.extensions.hf_export.fold import Fold, folded
from olm_train.extensions.hf_export.shards import WeightsFile, plan
from olm_train.extensions.hf_export.tokenizer_files import TokenizerFiles, tokenizer_files
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder

_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def family_to_export(
    config: DecoderConfig, tokenizer: bytes | None
) -> tuple[Family, DecoderConfig]:
    """Return the family that a model is written as, and the shape that is written: its weights are
    folded, see `fold.py`, and what its parameters have beyond those of `config` is zeros.

    Args:
        config: of the model.
        tokenizer: the `tokenizer.json` that lies beside it; None: there is none.

    Raises:
        UsageError: no family can express the model, or none with this tokenizer.
    """
    config = folded(config)
    family = family_of_config(config)
    if family.name != "qwen2" or tokenizer is None or _is_qwen2(decode_object(tokenizer)):
        return family, config
    written = config.changed(attention={"bias": "all"})
    return family_of_config(written), written


def family_of_run(config: DecoderConfig, lock: Lock | None) -> Family:
    """Return the family that a run's model is written as; raises as `family_to_export` does."""
    tokenizer = None if lock is None else known_tokenizer(lock)  # None: the exports have none
    return family_to_export(config, tokenizer)[0]


def exports_as(config: DecoderConfig, lock: Lock | None) -> str:
    """Return what `olm-train export --to hf` makes of a model, or what prevents it."""
    try:
        return f"exports as: {family_of_run(config, lock).architecture}"
    except UsageError as error:
        return f"exports as nothing that transformers knows: {error.what}"


def _is_qwen2(tokenizer: JsonObject) -> bool:
    """Whether a tokenizer is one that Qwen2Tokenizer of transformers is the same as."""
    before, after, model = map(_mapping, map(tokenizer.get, ("pre_tokenizer", "decoder", "model")))
    parts = before.get("pretokenizers")
    if not isinstance(parts, list) or len(parts) != 2:
        return False
    split = {
        "type": "Split",
        "pattern": {"Regex": _QWEN2_PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    level = {**_mapping(parts[1]), "trim_offsets": False}  # these change no id
    plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    rules = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    return (
        tokenizer.get("normalizer") == {"type": "NFC"}
        and before.get("type") == "Sequence"
        and parts[0] == split
        and level == {**plain, "trim_offsets": False}
        and after.get("type") == "ByteLevel"
        and model.get("type", "BPE") == "BPE"
        and not any(model.get(rule) for rule in (*rules, "byte_fallback", "ignore_merges"))
    )


def _mapping(value: object) -> JsonObject:
    return value if isinstance(value, dict) else {}


DTYPES: dict[Dtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20}
_UNITS["GIB"] = 1 << 30


class ExportOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is exported.

    Attributes:
        dtype: of the weights.
        shard_bytes: of tensors in a file, at most.
        tied_head: write a head that is the embedding table a second time.
        template: text of a chat template in place of that of the run; None: that of the run.
        context: tokens of the longest text it is for; None: those of the mixture's rows.
        check: files: read them back; transformers: also compute with them; auto: what is installed.
    """

    dtype: Dtype = "bfloat16"
    shard_bytes: int = 5 * 10**9
    tied_head: bool = False
    template: str | None = None
    context: int | None = None
    check: Verify = "auto"


def parse_size(text: str) -> int:
    """Return the bytes that `5GB`, `500MB`, `1GiB` or a plain number stand for.

    Raises:
        UsageError: they are none, or fewer than one.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([a-z]*)", text.strip().lower())
    unit = None if found is None else _UNITS.get(found[2].upper())
    size = 0 if found is None or unit is None else int(float(found[1]) * unit)
    if not 1 <= size < 1 << 62:
        raise UsageError(
            f"{text!r} is not a size", where="--shard-size", fix="give one such as 5GB or 500MB"
        )
    return size


class ExportJob:
    """One export: what is written, known before any of it is.

    Args:
        checkpoint: verified.
        options: see `ExportOptions`.
        config: shape of its model.

    Attributes:
        family: that it is written as, see `family_to_export`.
        config: the shape that is written.
        fold: makes its weights those that are written.
        lock: the mixture it was trained on; None: nobody recorded it.
        claim: which export it is.

    Raises:
        UsageError: no family can express the model.
    """

    def __init__(
        self, checkpoint: Checkpoint, options: ExportOptions, config: DecoderConfig
    ) -> None:
        self.checkpoint, self.options = checkpoint, options
        self._tokenizer = checkpoint.read_bytes(TOKENIZER)
        self.family, self.config = family_to_export(config, self._tokenizer)
        self.fold = Fold(config)
        known = {name for name, _ in Decoder(config, device="meta").named_parameters()}
        self._zeros = {row.ours for row in self.family.tensors(self.config)} - known
        data = checkpoint.read_bytes(LOCK)
        self.lock = None if data is None else Lock.decode(data, f"{checkpoint.folder}/{LOCK}")
        own = checkpoint.read_bytes(CHAT_TEMPLATE)
        self.template = options.template or (None if own is None else own.decode())
        digest = self.template and hashlib.sha256(self.template.encode()).hexdigest()
        if self.context is None:
            raise UsageError(
                "nobody recorded how long the texts are that this model is for",
                where="--context",
                why="config.json must say it, and the checkpoint has no mixture lock",
                fix="give --context TOKENS: those of the rows it was trained on",
            )
        self.claim = ModelClaim(
            checkpoint=checkpoint.manifest.digest,
            dtype=options.dtype,
            shard_bytes=options.shard_bytes,
            tied_head=options.tied_head and config.head.tied,
            template=digest or None,
            context=self.context,
        )

    @cached_property
    def context(self) -> int | None:
        """Tokens of the longest document it was trained on; None: nobody knows."""
        known = None if self.lock is None else self.lock.sequence_length
        return self.config.max_positions or self.options.context or known

    @cached_property
    def tokenizer(self) -> TokenizerFiles | None:
        """What is written of the tokenizer; None: the checkpoint has none."""
        if self._tokenizer is None:
            return None
        rules = None if self.lock is None else self.lock.tokenizer
        return tokenizer_files(
            self._tokenizer,
            rules,
            self.template,
            context=self.context,
            where=self.checkpoint.folder,
        )

    @cached_property
    def tensors(self) -> list[tuple[Box, TensorMap, TensorPart]]:
        """Each tensor that is written, and the rows of ours that it is."""
        dtype, found = DTYPES[self.options.dtype], []
        # GPT-2 as it was published: mlx-lm knows no other names
        bare = self.family.name == "gpt2" and self.config.head.tied
        prefix = self.family.names.prefix if bare and not self.claim.tied_head else ""
        for row in self.family.tensors(self.config):
            for part in row.parts:
                name = part.name.removeprefix(prefix)
                found.append((Box(name, dtype, part.shape), row, part))
                if self.claim.tied_head:
                    found += [(Box(n, dtype, part.shape), row, part) for n in row.copies]
        return found

    @cached_property
    def shards(self) -> list[WeightsFile]:
        """The files of weights."""
        return plan([planned for planned, _, _ in self.tensors], self.options.shard_bytes)

    def values(self) -> Iterator[Tensor]:
        """Yield each tensor in the order of `tensors`, read when it is asked for."""
        files, index = self.checkpoint.tensors, self.checkpoint.index
        rows, last = torch.empty(0), ("", slice(0))  # gate and up of an expert are read once
        for planned, row, part in self.tensors:
            at = (row.ours, part.ours)
            if row.ours in self._zeros:
                rows = torch.zeros(part.rows, *row.shape[1:])
            elif at != last:
                rows = read_rows(files, index, f"model.{row.ours}", part.ours.start, part.ours.stop)
                rows = self.fold.rows(row.ours, rows, part.ours.start)
            last = at
            yield rounded(part.of(rows), planned)

    @cached_property
    def model_config(self) -> JsonObject:
        """The `config.json`."""
        ends = () if self.tokenizer is None else self.tokenizer.eos
        begin = None if self.tokenizer is None else self.tokenizer.spec.bos
        return {
            **self.family.config_to_hf(
                self.config,
                max_position_embeddings=self.context,
                dtype=self.options.dtype,
                bos_token_id=begin,
                eos_token_id=ends[0] if ends else None,
            )
        }


def rounded(value: Tensor, planned: Box) -> Tensor:
    """Return a tensor in the dtype that is written.

    Raises:
        ValidationError: a number in it is not finite, or has no finite neighbour in that dtype.
    """
    found = value.to(planned.dtype)
    if bool(torch.isfinite(found).all()):
        return found
    wrong = int((~torch.isfinite(found)).sum())
    lost = bool(torch.isfinite(value).all())
    raise ValidationError(
        f"{wrong:,} weights of {planned.tensor} are not finite" + " any more" * lost,
        why=f"{str(planned.dtype)[6:]} has no numbers that large" if lost else None,
        fix="choose --dtype bfloat16 or float32" if lost else "choose an earlier checkpoint",
    )
