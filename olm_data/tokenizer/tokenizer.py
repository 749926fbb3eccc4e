"""Tokenizers: a `tokenizer.json` from a file, folder or hub, and the facts the rest needs about it.

    load_tokenizer("gpt2" | DIR | FILE, eos="auto", bos="none") -> TokenizerSpec

A `TokenizerSpec` is a picklable value: the bytes of the file as they were, their sha256, the sha256
of the ids it gives for a fixed probe text (so a library that reads the same file differently is
noticed), the vocabulary size as largest id + 1 (files have holes), and the BOS and EOS rule.

It never truncates, pads or adds special tokens, whatever the file asks for, and never imports
`tokenizers` at module import time.

Also: which token ends a document, where the command line leaves it open.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from olm_data.bounded_json import JsonObject, MalformedJson, decode_configuration, digest
from olm_data.errors import InputError, OlmError, UsageError, printable, said_by, suggest
from olm_data.path_kinds import nearest
from olm_data.storage.hub import hub_file
from olm_data.tokenizer.definition import Definition, Form
from olm_data.tokenizer.probe import probe

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# Names that mean "end of document" wherever they are a special token of a published tokenizer.
EOS_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<EOS>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


def end_token(
    eos: str, special: Mapping[str, int], configured: str | None, name: str
) -> str | None:
    """Return the token that ends documents, or None for none.

    Args:
        eos: what was asked for: a token, "none" or "auto".
        special: the special tokens.
        configured: the end token of the tokenizer's config file.

    Raises:
        UsageError: "auto", and it cannot be told.
    """
    if eos == "none":
        return None
    if eos != "auto":
        return eos
    if configured is not None:
        return configured
    found = [token for token in EOS_NAMES if token in special]
    if len(found) == 1:
        return found[0]
    known = ", ".join(list(special)[:12]) or "none"
    raise UsageError(
        "cannot tell which token ends a document"
        if not found
        else "several tokens may end a document",
        where=f"tokenizer {name}: special tokens: {known}",
        why="without an end token a model cannot learn where documents stop",
        fix=f'say --eos "{found[0] if found else "TOKEN"}", or --eos none for no end token',
    )


def configured_eos(config: bytes | None, name: str) -> str | None:
    """Return `eos_token` of a tokenizer_config.json, or None.

    Raises:
        InputError: it is no JSON object.
    """
    return named_tokens(read_config(config, name)).get("eos_token")


def read_config(data: bytes | None, where: str) -> JsonObject:
    """Return a tokenizer_config.json; {} where there is none.

    Raises:
        InputError: it is no JSON object.
    """
    try:
        return decode_configuration(data or b"{}")
    except MalformedJson as error:
        raise InputError(f"{CONFIG} is not a JSON object", where=where, why=str(error)) from error


def named_tokens(config: JsonObject) -> dict[str, str]:
    """Return the special tokens of a tokenizer_config.json by their names, as `eos_token`."""
    named = {}
    for name, value in config.items():
        token = value.get("content") if isinstance(value, dict) else value  # an object, or a text
        if name.endswith("_token") and isinstance(token, str):
            named[name] = token
    return named


# Hub ids people type by their short, retired name.
HUB_ALIASES = {
    "gpt2": "openai-community/gpt2",
    "dolma2": "allenai/dolma2-tokenizer",
    "gpt-neox-20b": "EleutherAI/gpt-neox-20b",
}

CONFIG = "tokenizer_config.json"
EXPORT = "export it: transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(NEW)"

# Part of format v1: changing any of these texts changes every `probe_sha256`.
PROBE_TEXTS = (
    "Hello world",
    " The quick brown fox jumps over the lazy dog.\nIt's 12345678 o'clock, isn't it?\r\n\r\n",
    "def f(x):\n    return {'a': x ** 2}  # 0x1F\n\t\tpass\n\n\n        end",
    "caf\u00e9 cafe\u0301 \u212b \uac00 \u1100\u1161 na\u00efve \ufb01 \u2126",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u4f60\u597d\u4e16\u754c "
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u043f\u0440\u0438\u0432\u0435\u0442",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 \u2764\ufe0f",
    "\x00\x01\x1b[31m\u200b\ufeff\u3000end",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "$\\int_0^1 x^2\\,dx = \\frac{1}{3}$ <|endoftext|> </s> [SEP] <s>",
)


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """A tokenizer and the rule for document ends, as a value.

    Attributes:
        name: label for people (`gpt2`); not an identity, `sha256` is.
        json_bytes: the `tokenizer.json`, byte for byte.
        sha256: of `json_bytes`, 64 hex digits.
        probe_sha256: of the ids of `PROBE_TEXTS`, encoded with special tokens as plain text.
        vocab_size: largest id + 1, so that every id is below it even where the file has holes.
        eos, bos: id put after / before each document, or None for none.
        eos_token, bos_token: the same as strings.
        special_tokens: content -> id of the special tokens (and of EOS and BOS); text that spells
            one is plain text unless asked otherwise.
        added_tokens: strings that are cut out of text before it is encoded, special ones included.
        unk: id of the unknown token, the one special token that plain text may become, or None.
        unk_token: the same as string.
        form: the Unicode normalisation form, where that is all the normaliser does; else None.
        rewrites: the normaliser's first step that follows Unicode tables or patterns, or "".
        lossless: True if the probe texts decode back to themselves; False for a tokenizer that
            normalises (NFC, lower case), whose datasets hold slightly other text than the input.
    """

    name: str
    json_bytes: bytes
    sha256: str
    probe_sha256: str
    vocab_size: int
    eos: int | None
    bos: int | None
    eos_token: str | None
    bos_token: str | None
    special_tokens: Mapping[str, int] = field(hash=False)
    added_tokens: tuple[str, ...]
    unk: int | None
    unk_token: str | None
    form: Form | None
    rewrites: str
    lossless: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of tokens on disk: uint16 up to 65,536 entries, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 65536 else np.uint32)

    @cached_property
    def reference(self) -> Tokenizer:
        """The `tokenizers.Tokenizer`: specials in text are plain, nothing truncated or padded."""
        return open_reference(self.encoder_json(), plain=True)

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, by `reference`; no BOS, no EOS, specials as plain text."""
        return list(self.reference.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: np.ndarray | Sequence[int]) -> str:
        """Return the text of `ids`, special tokens spelled out; broken UTF-8 becomes U+FFFD."""
        plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        with library_errors("the tokenizer fails to decode", self.name):
            return str(self.reference.decode(plain, skip_special_tokens=False))

    def delimited(self, *, eos: int | None, bos: int | None) -> TokenizerSpec:
        """Return this tokenizer with the EOS and BOS of a dataset, which are special tokens.

        An id that no token has is left out.
        """
        names = {i: self.reference.id_to_token(i) for i in (eos, bos) if i is not None}
        known = {i: name for i, name in names.items() if name is not None}
        special = {**self.special_tokens, **{name: i for i, name in known.items()}}
        spec = replace(
            self,
            eos=eos if eos in known else None,
            bos=bos if bos in known else None,
            eos_token=None if eos is None else known.get(eos),
            bos_token=None if bos is None else known.get(bos),
            special_tokens=dict(sorted(special.items())),
        )
        if special == self.special_tokens:
            vars(spec)["reference"] = self.reference  # it would be loaded once more
        return spec

    @cached_property
    def unspellable(self) -> Tokenizer:
        """As `reference`, but no text spells a special token, whatever model the file has."""
        return open_reference(self.encoder_json(unspellable=True), plain=True)

    def encoder_json(self, **changes: bool) -> bytes:
        """Return the JSON an encoder loads, changed as `Definition.variant` says."""
        return Definition(self.json_bytes, self.name).variant(self.special_tokens, **changes)

    def __getstate__(self) -> dict[str, Any]:
        cached = ("reference", "unspellable")
        return {name: value for name, value in self.__dict__.items() if name not in cached}


def load_tokenizer(reference: str | Path, *, eos: str = "auto", bos: str = "none") -> TokenizerSpec:
    """Load a tokenizer from a `tokenizer.json`, a folder that holds one, or a hub id.

    Args:
        reference: path or hub id (`gpt2`, `allenai/dolma2-tokenizer`); an existing path wins.
        eos: the token put after each document; "none" for none; "auto" takes `eos_token` of the
            `tokenizer_config.json` beside the file, else the one well-known name that is there.
        bos: the token put before each document, or "none".

    Raises:
        UsageError: nothing is there, or no EOS can be told, or a token is not in the vocabulary.
        InputError: the file is not a tokenizer.
        StorageError: the hub cannot be reached.
    """
    path = Path(reference)
    if path.is_dir():
        models = any(path.glob("*.model"))
        path /= "tokenizer.json"
        if not path.is_file():
            fix = f"export its sentencepiece model; {EXPORT}" if models else None
            raise UsageError("the folder holds no tokenizer.json", where=str(reference), fix=fix)
    if path.name.endswith(".model"):
        raise UsageError(
            "a sentencepiece model is not a tokenizer.json",
            where=str(reference),
            fix=f"{EXPORT}, then --tokenizer NEW",
        )
    if path.is_file():
        name, data, beside = _local_name(Path(reference)), path.read_bytes(), path.parent / CONFIG
        config = beside.read_bytes() if beside.is_file() else None
    else:
        name, data, config = _hub_files(os.fspath(reference))
    probe(data, name)
    return spec_from_bytes(data, name=name, config=config, eos=eos, bos=bos)


def _hub_files(text: str) -> tuple[str, bytes, bytes | None]:
    """Return the name, the `tokenizer.json` and the config of a tokenizer on the hub."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text) or text.endswith((".json", ".model")):
        raise UsageError(
            "no tokenizer here",
            where=text,
            fix=nearest(
                text, "give a tokenizer.json, a folder that holds one, or a hub id such as gpt2"
            ),
        )
    repository = HUB_ALIASES.get(text, text)
    found = hub_file(repository, "tokenizer.json")
    if found is None:
        raise UsageError(
            "this is neither a local path nor a hub repository with a tokenizer.json",
            where=text,
            fix=suggest(text, HUB_ALIASES),
        )
    return text.rsplit("/", 1)[-1], found, hub_file(repository, CONFIG)


def spec_from_bytes(
    data: bytes, *, name: str, config: bytes | None = None, eos: str = "auto", bos: str = "none"
) -> TokenizerSpec:
    """Build a spec from the bytes of a `tokenizer.json` and, if there is one, its config file.

    Raises:
        UsageError: as `load_tokenizer`.
        InputError: `data` is not a tokenizer the reference library can load.
    """
    definition = Definition(data, name)
    tokenizer = open_reference(data, plain=True, name=name)
    marked = definition.special_tokens
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    eos_token = end_token(eos, marked, configured_eos(config, name), name)
    bos_token = None if bos == "none" else bos
    special = dict(marked)
    for option, token in (("--eos", eos_token), ("--bos", bos_token)):
        if token is not None:
            if token not in vocabulary:
                raise UsageError(
                    f"the tokenizer has no token {token!r}",
                    where=f"{option} {token}",
                    fix=suggest(token, special or ["none"]),
                )
            special[token] = vocabulary[token]
    unk_token = definition.unknown_token
    ids = [ids_or_none(tokenizer, text) for text in PROBE_TEXTS]
    spec = TokenizerSpec(
        name=name,
        json_bytes=data,
        sha256=sha256(data).hexdigest(),
        probe_sha256=digest(ids),
        vocab_size=max(vocabulary.values()) + 1,
        eos=None if eos_token is None else vocabulary[eos_token],
        bos=None if bos_token is None else vocabulary[bos_token],
        eos_token=eos_token,
        bos_token=bos_token,
        special_tokens=dict(sorted(special.items())),
        added_tokens=definition.added_tokens,
        unk=None if unk_token is None else vocabulary.get(unk_token),
        unk_token=unk_token,
        form=definition.form,
        rewrites=definition.rewrites,
        lossless=all(
            row is not None and tokenizer.decode(row, skip_special_tokens=False) == text
            for row, text in zip(ids, PROBE_TEXTS, strict=True)
        ),
    )
    if not (special.keys() - marked.keys()) & set(definition.added_tokens):
        # the file marks EOS and BOS itself: `reference` would load just this once more
        vars(spec)["reference"] = tokenizer
    return spec


def failure(error: BaseException) -> str | None:
    """Return what the tokenizers library says of its failure; None if `error` is not one.

    It raises bare `Exception`, and a panic of its Rust code is no `Exception` at all.
    """
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return said_by(error)
    return None


@contextmanager
def library_errors(
    what: str,
    where: str | None = None,
    *,
    kind: type[OlmError] = InputError,
    fix: str | None = None,
) -> Iterator[None]:
    """Around calls of a tokenizers library: what it raises is an error of the user's tokenizer.

    Args:
        what, where, fix: of the message.
        kind: of the error.

    Raises:
        OlmError: of this kind: it has failed.
    """
    try:
        yield
    except BaseException as error:
        if (why := failure(error)) is None:
            raise
        raise kind(what, where=where, why=why, fix=fix) from error


def ids_or_none(tokenizer: Tokenizer, text: str) -> list[int] | None:
    """Return the ids of a text; None where the library fails on it."""
    try:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    except BaseException as error:
        if failure(error) is None:
            raise
        return None


def open_reference(data: bytes, *, plain: bool, name: str = "tokenizer") -> Tokenizer:
    """Return the reference library's tokenizer, without truncation and padding.

    Args:
        plain: encode text that spells a special token as ordinary text.

    Raises:
        InputError: `data` is not a tokenizer file.
    """
    from tokenizers import Tokenizer

    with library_errors(
        "this is not a tokenizer file the tokenizers library can load",
        name,
        fix="export it as tokenizer.json (tokenizers.Tokenizer.save)",
    ):
        tokenizer = Tokenizer.from_str(data.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = plain
    return tokenizer


def _local_name(path: Path) -> str:
    """A label that does not depend on the machine: the folder's or file's own name, as given."""
    if path.name == "tokenizer.json":
        return printable(path.parent.name) or "tokenizer"
    return printable(path.name.removesuffix(".json") or path.resolve().name)
