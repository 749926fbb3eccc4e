"""Which token ends a document, where the command line leaves it open."""

from __future__ import annotations

from collections.abc import Mapping

from olm_data.bounded_json import MalformedJson, decode_configuration
from olm_data.errors import InputError, UsageError

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
    if config is None:
        return None
    try:
        token = decode_configuration(config).get("eos_token")
    except MalformedJson as error:
        raise InputError(
            "tokenizer_config.json is not a JSON object", where=name, why=str(error)
        ) from error
    if isinstance(token, dict):  # the library also writes tokens as objects
        token = token.get("content")
    return token if isinstance(token, str) else None
