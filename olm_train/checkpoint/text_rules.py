"""How the texts of a model begin and end, and how conversations become its prompts.

mixture.lock.json                     --+
tokenizer.json alone                  --+-> TextRules -> prompts, ends of texts, chat template
files of another program              --+  (see `model_format`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from olm_data.dataset.tokenizer import end_of_document
from olm_data.mixture.lock import Lock

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHAT_TEMPLATE = "chat_template.jinja"
"""Of a model's folder."""


@dataclass(frozen=True, kw_only=True)
class TextRules:
    """What a text of a model needs beside the tokenizer.

    Attributes:
        begins: id before each document and each prompt; None: none.
        eos: id that ends a document; None: none does.
        first: id that an empty prompt becomes; None: there is none.
        ends: ids that end a text that is written.
        context: most tokens the model looks at; None: nobody recorded it.
        template: Jinja text of its chat template; None: it has none.
        special: text of special tokens by the names that templates know.
        whole: a template spells the token that begins its prompts, if any does.
    """

    begins: int | None = None
    eos: int | None = None
    first: int | None = None
    ends: tuple[int, ...] = ()
    context: int | None = None
    template: str | None = None
    special: Mapping[str, str] = field(default_factory=dict)
    whole: bool = False

    @classmethod
    def of_ids(
        cls,
        tokenizer: Tokenizer,
        begins: int | None,
        eos: int | None,
        *,
        context: int | None = None,
        template: str | None = None,
    ) -> TextRules:
        """Return the rules of texts that begin and end by these ids, as those of a lock do."""
        return cls(
            begins=begins,
            eos=eos,
            first=eos if begins is None else begins,
            ends=() if eos is None else (eos,),
            context=context,
            template=template,
            special={} if eos is None else {"eos_token": _text_of(tokenizer, eos)},
        )

    @classmethod
    def of_lock(cls, tokenizer: Tokenizer, lock: Lock, template: str | None) -> TextRules:
        """Return the rules of a model that was trained on a mixture."""
        bos, eos = lock.tokenizer.bos, lock.tokenizer.eos
        return cls.of_ids(tokenizer, bos, eos, context=lock.sequence_length, template=template)

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer) -> TextRules:
        """Return the rules where nobody recorded any: a well-known name ends a document."""
        return cls.of_ids(tokenizer, None, end_of_document(tokenizer))


def _text_of(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)
