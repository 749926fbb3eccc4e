"""How the texts of a model of transformers begin and end: what transformers goes by.

The post-processor of the tokenizer says what stands before a text, `generation_config.json` what
ends one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from olm_data.bounded_json import JsonObject
from olm_data.dataset.tokenizer import TOKENIZER, end_of_document
from olm_data.errors import InputError, ValidationError, printable
from olm_train.checkpoint.text_rules import CHAT_TEMPLATE, TextRules
from olm_train.extensions.hf.source import (
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    read_beside,
    read_fields,
    text_beside,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PROBE = "a"


def text_rules(place: str, tokenizer: Tokenizer) -> TextRules:
    """Return the rules of a model at a pinned place, by the files that lie beside its weights.

    A document ends as `olm-data tokenize` has it with this tokenizer: by the `eos_token` of
    `tokenizer_config.json`, or a well-known name.

    Raises:
        InputError: its tokenizer cannot be used here.
        ValidationError: a file is malformed.
        StorageError: the hub or store cannot be reached.
    """
    model, config = read_fields(place), read_beside(place, TOKENIZER_CONFIG) or {}
    written = read_beside(place, GENERATION_CONFIG) or {}
    _refuse_other_tokens(tokenizer, config, place)
    special = {
        name: text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _text(config.get(name))) is not None
    }
    begins = _put_before(tokenizer, place)
    eos = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    eos = end_of_document(tokenizer) if eos is None else eos
    given = [_ids(each, "eos_token_id", place) for each in (written, model)]
    ends = next((ids for ids in given if ids), () if eos is None else (eos,))
    starts = [_ids(each, "bos_token_id", place)[:1] for each in (written, model)]
    known = [begins, *(ids[0] for ids in starts if ids), eos, *ends]
    context = model.get("max_position_embeddings")
    return TextRules(
        begins=begins,
        eos=eos,
        first=next((each for each in known if each is not None), None),
        ends=ends,
        context=context if isinstance(context, int) and context > 0 else None,
        template=_template(place, config),
        special=special,
        whole=True,
    )


def _put_before(tokenizer: Tokenizer, place: str) -> int | None:
    """Return the id that the post-processor puts before a text; None: it puts none.

    Raises:
        InputError: it puts several.
    """
    plain: list[int] = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    whole: list[int] = tokenizer.encode(_PROBE).ids
    at = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
    if at > 1:
        raise InputError(
            f"the tokenizer puts {at} tokens before each text",
            where=f"{place}/{TOKENIZER}",
            why="this program knows one that begins a document",
            fix="take them out of the post_processor in a copy, and write them into your prompts",
        )
    return whole[0] if at else None


def _refuse_other_tokens(tokenizer: Tokenizer, config: JsonObject, place: str) -> None:
    """Refuse a `tokenizer_config.json` with tokens that the `tokenizer.json` has not.

    transformers would add them: it cuts them out of texts, where the file alone spells them.
    """
    listed = config.get("added_tokens_decoder")
    tokens = {} if not isinstance(listed, dict) else listed
    wanted = {str(number): _text(token) for number, token in tokens.items()}
    wrong = [
        text
        for number, text in wanted.items()
        if text is not None and str(tokenizer.token_to_id(text)) != number
    ]
    named = [_text(config.get(name)) for name in ("bos_token", "eos_token")]
    wrong += [text for text in named if text and tokenizer.token_to_id(text) is None]
    if wrong:
        raise InputError(
            f"{TOKENIZER_CONFIG} has {len(wrong):,} tokens that are not in the {TOKENIZER}: "
            f"{printable(wrong[0][:40])!r}",
            where=place,
            why="transformers adds them, so that its ids would be others",
            fix="save the tokenizer anew with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        )


def _text(token: object) -> str | None:
    """Return the text of a token, which may stand there as an object."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _ids(fields: Mapping[str, Any], name: str, place: str) -> tuple[int, ...]:
    """Return an id, or a list of them; empty where there is none.

    Raises:
        ValidationError: it is another thing.
    """
    value = fields.get(name)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(each, int) or isinstance(each, bool) for each in listed):
        raise ValidationError(
            f"{name} is {printable(str(value)[:60])}, which is no id and no list of ids",
            where=place,
        )
    return tuple(dict.fromkeys(listed))


def _template(place: str, config: JsonObject) -> str | None:
    """Return the chat template: that of its own file, or the one in `tokenizer_config.json`.

    Raises:
        InputError: there are several, by names, and none is the default.
    """
    own = text_beside(place, CHAT_TEMPLATE)
    if own is not None:
        return own
    found = config.get("chat_template")
    if isinstance(found, list):
        each = [part for part in found if isinstance(part, dict)]
        named = {str(part.get("name")): part.get("template") for part in each}
        if "default" not in named:
            names = ", ".join(printable(name[:20]) for name in list(named)[:8])
            raise InputError(
                f"the model has chat templates by names, and none is the default: {names}",
                where=f"{place}/{TOKENIZER_CONFIG}",
                fix="write the one to use into a file: --template FILE",
            )
        found = named["default"]
    return found if isinstance(found, str) else None
