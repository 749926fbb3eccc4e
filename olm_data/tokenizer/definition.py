"""What a `tokenizer.json` says, as JSON: which rules it has, and the variants encoders are given.

The file is a stranger's: nothing here trusts its types.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from hashlib import sha256
from typing import Any, Literal, cast

import msgspec

from olm_data.decoding import convert
from olm_data.errors import InputError
from olm_data.tokenizer.byte_alphabet import byte_alphabet

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})

MOST_GROWTH = 64
"""How many characters one may become by the rules of a normaliser or decoder."""


class BpeModel(msgspec.Struct, frozen=True):
    """The `model` of a byte-pair encoding."""

    vocab: dict[str, int]
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    unk_token: str | None = None
    ignore_merges: bool | None = None
    byte_fallback: bool | None = None


class Definition:
    """A parsed `tokenizer.json`.

    Args:
        data: the file.
        name: what to call it in messages.

    Raises:
        InputError: it is no JSON object with a model, or rules of its normaliser or decoder make
            more than `MOST_GROWTH` characters of one.
    """

    def __init__(self, data: bytes, name: str) -> None:
        self._json = _parsed(data, name)
        self._model: dict[str, Any] = self._json["model"]
        self._added: list[dict[str, Any]] = self._json.get("added_tokens") or []
        self._refuse_growth(name)

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """What is cut out of text before it is encoded."""
        return tuple(token["content"] for token in self._added)

    @property
    def special_tokens(self) -> dict[str, int]:
        """The ids of the added tokens that the file marks as special."""
        return {token["content"]: token["id"] for token in self._added if token.get("special")}

    @property
    def form(self) -> Form | None:
        """The Unicode normalisation form, where that is all the file's normaliser does."""
        kinds = [step.get("type") for step in self._steps("normalizer")]
        return cast(Form, kinds[0]) if len(kinds) == 1 and kinds[0] in FORMS else None

    @property
    def rewrites(self) -> str:
        """The first step of the normaliser that depends on tables or patterns, or "".

        A step that puts a fixed string at the start, or one for another, depends on neither.
        """
        for step in self._steps("normalizer"):
            kind, pattern = step.get("type"), step.get("pattern")
            literal = isinstance(pattern, Mapping) and isinstance(pattern.get("String"), str)
            if kind != "Prepend" and not (kind == "Replace" and literal):
                return str(kind)[:40]
        return ""

    @property
    def unknown_token(self) -> str | None:
        """The unknown token: by name, or for Unigram by its place in the vocabulary."""
        place, vocabulary = self._model.get("unk_id"), self._model.get("vocab")
        if isinstance(vocabulary, list) and isinstance(place, int) and 0 <= place < len(vocabulary):
            piece = vocabulary[place]
            return str(piece[0]) if isinstance(piece, list) and piece else None
        name = self._model.get("unk_token")
        return name if isinstance(name, str) else None

    @property
    def letters(self) -> set[int]:
        """The code points of which the pieces of the vocabulary are made."""
        vocabulary = self._model.get("vocab") or ()
        pieces = (piece if isinstance(piece, str) else piece[0] for piece in vocabulary)
        return {ord(letter) for letter in set().union(*pieces)}

    @property
    def bpe(self) -> BpeModel | None:
        """The model, where it is a byte-pair encoding."""
        is_bpe = self._model.get("type", "BPE") == "BPE"
        return convert(self._model, BpeModel) if is_bpe else None

    def variant(
        self,
        special: Collection[str],
        *,
        strip_special: bool = False,
        strip_normalizer: bool = False,
        unspellable: bool = False,
    ) -> bytes:
        """Return the JSON an encoder loads: no truncation or padding, EOS and BOS marked special.

        Args:
            special: the special tokens, EOS and BOS among them.
            strip_special: leave the special added tokens out (the vocabulary keeps their ids), for
                encoders that otherwise parse them inside text.
            strip_normalizer: leave the normaliser out.
            unspellable: give the special tokens names that no text spells, wherever they stand, so
                that a model whose vocabulary holds them cannot make one of ordinary text. Ids and
                scores stay, so other text gets the same ids.
        """
        added = [
            token | {"special": bool(token.get("special")) or token["content"] in special}
            for token in self._added
        ]
        if strip_special:
            added = [token for token in added if not token["special"]]
        changed = {**self._json, "added_tokens": added, "truncation": None, "padding": None}
        if strip_normalizer:
            changed["normalizer"] = None
        if unspellable:
            names = {name: _hidden(name) for name in {*special, self.unknown_token or ""} - {""}}
            for token in added:
                token["content"] = names.get(token["content"], token["content"])
            changed |= {"post_processor": None, "model": _renamed(self._model, names)}
        return msgspec.json.encode(changed)

    def boundary_probe(self) -> bytes | None:
        """Return a tokenizer that cuts text as this one does, and whose ids show the cuts.

        Its model joins any two bytes, those on both sides of a character's edge first. So a word
        that goes on where another ends has other ids, which the real vocabulary shows only where it
        happens to hold a piece that crosses the edge. No normaliser and no added tokens. None for a
        tokenizer that is not byte-level BPE.
        """
        rules = self._steps("pre_tokenizer")
        byte_level = any(step.get("type") == "ByteLevel" for step in rules)
        if not byte_level or self._model.get("type", "BPE") != "BPE":
            return None
        letters = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)  # by byte
        pairs = sorted(((a, b) for a in range(256) for b in range(256)), key=_edge_first)
        merges = [[letters[a], letters[b]] for a, b in pairs]
        vocabulary = [*letters, *("".join(merge) for merge in merges)]
        return msgspec.json.encode(
            {
                "version": "1.0",
                "added_tokens": [],
                "normalizer": None,
                "pre_tokenizer": _spelled_out(rules[0])
                if len(rules) == 1
                else {"type": "Sequence", "pretokenizers": [*map(_spelled_out, rules)]},
                "model": {
                    "type": "BPE",
                    "vocab": {piece: k for k, piece in enumerate(vocabulary)},
                    "merges": merges,
                },
            }
        )

    def _refuse_growth(self, name: str) -> None:
        for part in ("normalizer", "decoder"):
            growth = 1
            for step in self._steps(part):
                if step.get("type") == "Replace":
                    pattern, content = step.get("pattern"), step.get("content")
                    found = pattern.get("String") if isinstance(pattern, Mapping) else None
                    least = len(found) if isinstance(found, str) and found else 1
                    growth *= max(1, -(-len(content) // least)) if isinstance(content, str) else 1
                elif step.get("type") in ("NFKC", "NFKD"):
                    growth *= 18  # of U+FDFA
                if growth > MOST_GROWTH:
                    raise InputError(
                        f"the {part} of the tokenizer file multiplies text",
                        where=name,
                        why=f"its rules make more than {MOST_GROWTH} characters of one, so a short "
                        "text would fill the memory",
                        fix="take a tokenizer.json from a source you trust",
                    )

    def _steps(self, part: str) -> list[Mapping[str, Any]]:
        """The steps of a part of the pipeline, sequences laid flat."""
        waiting, found = [self._json.get(part)], []
        while waiting:
            step = waiting.pop(0)
            if isinstance(step, Mapping):
                inner = step.get(_STEPS[part])
                if step.get("type") == "Sequence" and isinstance(inner, list):
                    waiting[:0] = inner
                else:
                    found.append(step)
        return found


_STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
"""Part of the pipeline -> key of the steps of a `Sequence` there."""


def _parsed(data: bytes, name: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(
            "the tokenizer file is not valid JSON", where=name, why=str(error)
        ) from error
    if not isinstance(found, dict) or not isinstance(found.get("model"), dict):
        raise InputError(
            "the tokenizer file is not a JSON object with a model",
            where=name,
            fix="export it as tokenizer.json (tokenizers.Tokenizer.save)",
        )
    return found


def _spelled_out(step: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a step with what it leaves out, so that the same rules have the same spelling."""
    if step.get("type") != "ByteLevel":
        return step
    return {"use_regex": True, **step, "trim_offsets": True}


def _edge_first(pair: tuple[int, int]) -> tuple[int, int, int]:
    """Order pairs of bytes: at the edge of an ASCII character, between others, inside one."""
    first, second = pair
    if first < 0x80 or second < 0x80:
        return 0, first, second
    return 1 + (second < 0xC0), first, second


def _hidden(name: str) -> str:
    """A name that stands in no text: a noncharacter and a digest."""
    return f"\ufdd0{sha256(name.encode()).hexdigest()}"


def _renamed(model: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    inner = dict(model)
    vocabulary = inner.get("vocab")
    if isinstance(vocabulary, list):
        inner["vocab"] = [[names.get(piece, piece), *rest] for piece, *rest in vocabulary]
    elif isinstance(vocabulary, dict):
        inner["vocab"] = {names.get(piece, piece): i for piece, i in vocabulary.items()}
    if isinstance(inner.get("unk_token"), str):
        inner["unk_token"] = names.get(inner["unk_token"], inner["unk_token"])
    if isinstance(inner.get("merges"), list):
        inner["merges"] = [merge for merge in inner["merges"] if not _makes(merge, names)]
    return inner


def _makes(merge: object, names: Mapping[str, str]) -> bool:
    """Whether a merge makes one of the names, or takes one."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    return isinstance(parts, list) and any(part in names for part in ("".join(parts), *parts))
