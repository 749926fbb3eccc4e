"""The tokenizer of a checkpoint as the files that readers of such folders look for, and its proof.

    tokenizer.json -------------------+--> tokenizer.json, tokenizer_config.json,
    lock: what begins and ends texts -'    special_tokens_map.json, generation_config.json
    chat template, if there is one ------> chat_template.jinja, and in tokenizer_config.json

tokenizer.json is copied byte for byte, but where readers would put other tokens before or after a
text by it than the model was trained with: transformers goes by its post-processor alone, and
`add_bos_token` is not read. Then that is written anew, and nothing else of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from olm_data.bounded_json import JsonObject, decode_object
from olm_data.dataset.tokenizer import TOKENIZER, TokenizerRules, end_of_document, refuse_other
from olm_data.dataset.tokenizer import spec_of as dataset_spec
from olm_data.errors import ValidationError, printable
from olm_data.tokenizer.tokenizer import PROBE_TEXTS, TokenizerSpec, open_reference, spec_from_bytes
from olm_train.checkpoint.text_rules import CHAT_TEMPLATE
from olm_train.extensions.generate.template import ChatTemplate, Message
from olm_train.extensions.hf.source import GENERATION_CONFIG, TOKENIZER_CONFIG

SPECIAL_TOKENS = "special_tokens_map.json"
PROBES = (*PROBE_TEXTS, "in 1984, 123456789 e\u0301\u1e9b\u0323", "long " * 2_000, "")
"""Texts whose ids are compared; the long one finds a file that cuts texts off."""
_ANSWER = "ANSWER-OF-THE-ASSISTANT"


@dataclass(frozen=True)
class TokenizerFiles:
    """What is written of a tokenizer.

    Attributes:
        spec: the tokenizer.
        eos: ids that end a text or an answer, that of the document's end first.
        files: bytes by name.
    """

    spec: TokenizerSpec
    eos: tuple[int, ...]
    files: Mapping[str, bytes]


def tokenizer_files(
    data: bytes,
    rules: TokenizerRules | None,
    template: str | None,
    *,
    context: int | None,
    where: str,
) -> TokenizerFiles:
    """Return the files of a tokenizer.

    Args:
        data: its `tokenizer.json`.
        rules: of the lock; None: nobody recorded them, and a well-known name ends documents.
        template: Jinja text of a chat template, None for none.
        context: tokens of the longest document it was trained on; None: nobody knows.
        where: the checkpoint, for messages.

    Raises:
        ValidationError: it is another one than that of the data.
        InputError: it is not safe to use, or the template is none.
    """
    spec = _spec(data, rules, f"{where}/{TOKENIZER}")
    ends = [] if spec.eos is None else [spec.eos]
    if template is not None:
        ends += [end for end in _turn_ends(spec, template) if end not in ends]
    named = {"bos_token": spec.bos_token, "eos_token": spec.eos_token, "unk_token": spec.unk_token}
    special = {name: token for name, token in named.items() if token is not None}
    config: JsonObject = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "add_bos_token": spec.bos is not None,  # to some readers; the post-processor says the same
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    if context is not None:
        config["model_max_length"] = context
    generation: JsonObject = {"_from_model_config": False}
    if spec.bos is not None:
        generation["bos_token_id"] = spec.bos
    if ends:
        generation["eos_token_id"] = ends
    files = {
        TOKENIZER: _begun(spec),
        SPECIAL_TOKENS: _json(special),
        GENERATION_CONFIG: _json(generation),
    }
    if template is not None:
        config["chat_template"] = template
        files[CHAT_TEMPLATE] = template.encode()
    return TokenizerFiles(spec, tuple(ends), {**files, TOKENIZER_CONFIG: _json(config)})


def prove(folder: Path, tokenizer: TokenizerFiles) -> list[str]:
    """Read the tokenizer back from a folder and compare ids; return the readers that gave them:
    the AutoTokenizer of transformers too, where it is installed.

    Args:
        folder: local, with everything in it.
        tokenizer: what was written.

    Raises:
        ValidationError: a reader gives other ids, or knows other special tokens.
    """
    spec = tokenizer.spec
    data = (folder / TOKENIZER).read_bytes()
    again = spec_from_bytes(data, name=TOKENIZER, eos="none", bos="none")
    if (data, again.probe_sha256) != (tokenizer.files[TOKENIZER], spec.probe_sha256):
        raise ValidationError("the tokenizer reads back as another one", where=str(folder))
    readers = [f"tokenizers {version('tokenizers')}"]
    if find_spec("transformers") is None:
        return readers
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    ours = open_reference(spec.json_bytes, plain=False)
    if (theirs.eos_token_id, theirs.bos_token_id) != (spec.eos, spec.bos):
        raise ValidationError("transformers reads other special tokens", where=str(folder))
    begin = [] if spec.bos is None else [spec.bos]
    for text in PROBES:
        wanted = [*begin, *ours.encode(text, add_special_tokens=False).ids]
        for added in (True, False):
            found = theirs(text, add_special_tokens=added, verbose=False)["input_ids"]
            if list(found) != (wanted if added else wanted[len(begin) :]):
                raise _other_ids(text, folder)
        if theirs.decode(wanted, clean_up_tokenization_spaces=False) != ours.decode(
            wanted, skip_special_tokens=False
        ):
            raise _other_ids(text, folder)
    return [*readers, f"AutoTokenizer of transformers {version('transformers')}"]


def _other_ids(text: str, folder: Path) -> ValidationError:
    return ValidationError(
        f"transformers gives other ids than the tokenizer for the text {printable(text[:40])!r}",
        where=str(folder),
        why="a model would read other tokens than it was trained on",
    )


def _spec(data: bytes, rules: TokenizerRules | None, where: str) -> TokenizerSpec:
    if rules is not None:
        refuse_other(data, rules, where)
        return dataset_spec(data, rules, where, TOKENIZER)
    found = spec_from_bytes(data, name=TOKENIZER, eos="none", bos="none")
    return found.delimited(eos=end_of_document(found.reference), bos=None)


def _begun(spec: TokenizerSpec) -> bytes:
    """Return the tokenizer.json by which readers put before a text what the model was trained with,
    and nothing behind it: the file as it is, if it does."""
    ours = open_reference(spec.json_bytes, plain=False)
    begin = [] if spec.bos is None else [spec.bos]
    plain = (list(ours.encode(text, add_special_tokens=False).ids) for text in PROBE_TEXTS)
    added = (list(ours.encode(text).ids) for text in PROBE_TEXTS)
    if all(a == [*begin, *b] for a, b in zip(added, plain, strict=True)):
        return spec.json_bytes
    first: list[JsonObject] = []
    special: JsonObject = {}
    if spec.bos is not None and spec.bos_token is not None:
        token = spec.bos_token
        first = [{"SpecialToken": {"id": token, "type_id": 0}}]
        special = {token: {"id": token, "ids": [spec.bos], "tokens": [token]}}
    one, two = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    value = {
        **decode_object(spec.json_bytes),
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*first, one],
            "pair": [*first, one, *first, two],
            "special_tokens": special,
        },
    }
    return _json(value)


def _turn_ends(spec: TokenizerSpec, template: str) -> list[int]:
    """Return the special token that a template puts right behind an answer, if it puts one."""
    chat = ChatTemplate.of(template, {"eos_token": spec.eos_token or ""}, CHAT_TEMPLATE)
    text = chat.prompt([Message("user", "question"), Message("assistant", _ANSWER)])
    _, found, rest = text.rpartition(_ANSWER)
    if not found:
        return []
    at = {rest.find(token): id_ for token, id_ in spec.special_tokens.items() if token in rest}
    first = min(at, default=None)
    return [] if first is None or rest[:first].strip() else [at[first]]


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
