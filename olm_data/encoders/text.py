"""What every run does around an encoder: the rule for special tokens, and the audit.

text -> Scanner (count, or refuse)  ->  Encoder.encode  ->  no special id in bodies?
                                                        ->  every 10,000th document: as `hf`?
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from olm_data.encoders.base import Encoded, Encoder, SpecialPolicy
from olm_data.encoders.parity import first_difference
from olm_data.encoders.special import Scanner, refuse_special_ids, special_ids
from olm_data.errors import InputError, ValidationError
from olm_data.tokenizer import TokenizerSpec

AUDIT_EVERY = 10_000  # documents, counted in each process; the gate has proved the first ones
AUDIT_BYTES = 1 << 20  # longer documents are not audited: the reference takes a second a megabyte


class TextEncoder:
    """An encoder with the rule for special tokens and the audit against the reference.

    Args:
        encoder: the plug-in.
        tokenizer: what it encodes with.
        special: "plain" encodes strings that spell a special token as ordinary text, "allow" lets
            them become that token, "error" refuses the document.
        reference: makes the reference encoder for the audit, or None for no audit (the plug-in is
            the reference).
    """

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: TokenizerSpec,
        special: SpecialPolicy,
        reference: Callable[[], Encoder] | None = None,
    ) -> None:
        self.name = encoder.name
        self._encoder = encoder
        self._special = special
        self._scanner = Scanner(tokenizer.special_tokens)
        self._forbidden = special_ids(tokenizer)
        self._make_reference = reference
        self._reference: Encoder | None = None
        self._seen = 0

    def encode(
        self,
        data: np.ndarray,
        offsets: np.ndarray,
        where: Callable[[int], str] = "document {} of the batch".format,
    ) -> Encoded:
        """Encode document bodies.

        Args:
            data: uint8[n], valid UTF-8 of the documents, concatenated.
            offsets: int64[d + 1], rising from 0 to n.
            where: names document k of this batch, for messages.

        Raises:
            InputError: a special token in the text, with `special="error"`.
            ValidationError: the encoder disagrees with the reference, or broke the rule for
                specials.
        """
        hits = self._scanner.hits(data, offsets)
        if hits and self._special == "error":
            document, token = min(hits)
            raise InputError(
                f"the text spells the special token {token}",
                where=where(document),
                fix="--special plain encodes it as ordinary text",
            )
        ids, ends = self._encoder.encode(data, offsets)
        if self._special != "allow":
            refuse_special_ids(ids, self._forbidden, self.name)
        self._audit(data, offsets, ids, ends, where)
        return Encoded(ids, ends, len(hits))

    def _audit(
        self,
        data: np.ndarray,
        offsets: np.ndarray,
        ids: np.ndarray,
        ends: np.ndarray,
        where: Callable[[int], str],
    ) -> None:
        documents = len(offsets) - 1
        first = -(self._seen + 1) % AUDIT_EVERY  # the document that makes the count a multiple
        self._seen += documents
        if self._make_reference is None:
            return
        for k in range(first, documents, AUDIT_EVERY):
            size = int(offsets[k + 1] - offsets[k])
            if size > AUDIT_BYTES:
                continue
            if self._reference is None:
                self._reference = self._make_reference()
            text = data[offsets[k] : offsets[k + 1]]
            wanted, _ = self._reference.encode(text, np.array([0, size], dtype=np.int64))
            got = ids[ends[k] : ends[k + 1]]
            if not np.array_equal(wanted, got):
                raise ValidationError(
                    f"the encoder {self.name} disagrees with the reference",
                    where=where(k),
                    why=first_difference(wanted, got),
                    fix="--encoder hf, and report this document",
                )
