"""As which family a model is written, where readers go by the family and not by the files.

transformers 5 makes its own Qwen2Tokenizer of whatever tokenizer.json lies beside a Qwen 2: NFC,
and each digit by itself. With another tokenizer a Qwen 2 is written as what computes the same: a
Llama, or with windows a SmolLM 3, whose attention has the bias of its output map too, of zeros.
"""

from __future__ import annotations

from olm_data.bounded_json import JsonObject, decode_object
from olm_data.errors import OlmError, UsageError
from olm_data.mixture.lock import Lock
from olm_train.checkpoint.documents import tokenizer_of_data
from olm_train.extensions.hf.table import Family, family_of_config
from olm_train.model.config import DecoderConfig

_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def family_to_export(
    config: DecoderConfig, tokenizer: bytes | None
) -> tuple[Family, DecoderConfig]:
    """Return the family that a model is written as, and the shape that is written: what its
    parameters have beyond those of `config` is zeros.

    Args:
        config: of the model.
        tokenizer: the `tokenizer.json` that lies beside it; None: there is none.

    Raises:
        UsageError: no family can express the model, or none with this tokenizer.
    """
    family = family_of_config(config)
    if family.name != "qwen2" or tokenizer is None or _is_qwen2(decode_object(tokenizer)):
        return family, config
    written = config.changed(attention={"bias": "all"})
    return family_of_config(written), written


def family_of_run(config: DecoderConfig, lock: Lock | None) -> Family:
    """Return the family that a run's model is written as; raises as `family_to_export` does."""
    tokenizer = None
    if lock is not None:
        try:
            tokenizer = tokenizer_of_data(lock)
        except OlmError:
            tokenizer = None  # then the exports hold none either
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
