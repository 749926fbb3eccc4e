"""Texts on which the gate compares encoders as a run uses them (code points: `sweep`).

adversarial  texts on which tokenizers have been seen to differ, and random ones
sample_of    the start of the input
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from olm_data.encoders.base import Texts, concatenate
from olm_data.tokenizer.tokenizer import PROBE_TEXTS, TokenizerSpec

SAMPLE_BYTES = 1 << 18  # the reference takes half a second a megabyte; the audit does the rest


def sample_of(data: np.ndarray, offsets: np.ndarray) -> Texts:
    """Return documents from the start, `SAMPLE_BYTES` of text at most; longer ones are left out."""
    rows: list[bytes] = []
    room = SAMPLE_BYTES
    for start, stop in pairwise(offsets.tolist()):
        if stop - start <= room:
            rows.append(data[start:stop].tobytes())
            room -= stop - start
        if room == 0:
            break
    return concatenate(rows)


def adversarial(tokenizer: TokenizerSpec) -> list[bytes]:
    """Return short documents on which tokenizers have been seen to differ."""
    texts = list(PROBE_TEXTS)
    texts += ["", " ", "\n", "\r\n\r\n \r\n", "\t \t", "a", "\x00", "\ufeff", "\ufffd"]
    texts += [space * n for space in (" ", "\n", "\t", "\u00a0", "\u3000") for n in (2, 7, 100)]
    texts += [f"x{' ' * n}y{chr(10) * n}z" for n in range(1, 30)]
    texts += ["a" * 10_000, "ab" * 5_000, " a" * 3_000, "1" * 1_000, "!?" * 500, "\u0301" * 300]
    texts += [str(n) for n in (0, 7, 10, 999, 1000, 123456789, 3.14159, -1e300)]
    texts += ["1,234,567.89", "\u0661\u0662\u0663", "x\u00b2 \u00bd \u2167 \u2460"]
    # Combining marks, composed and decomposed; conjoining Hangul; marks in the wrong order.
    texts += ["\u00e9", "e\u0301", "e\u0301\u0323", "e\u0323\u0301", "\u1112\u1161\u11ab", "\ud55c"]
    texts += [
        "n\u0303o \u0915\u094d\u0937\u093f \u0e01\u0e33 \u0627\u064b\u0651 \u05d0\u05b8\u05d1"
    ]
    texts += ["\u202eabc\u202c \u0627\u0644\u0639\u0631\u0628\u064a\u0629 abc \u05e2\u05d1\u05e8"]
    texts += [
        "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f3fd",
        "\U0001f600" * 99,
    ]
    texts += ["I'm we'LL it's CAN'T don\u2019t 'tis ''s 'S", "HTTPServer camelCase snake_case"]
    texts += [
        "<|",
        "|>",
        "<|endoftext",
        "endoftext|>",
        "<||>",
        "[",
        "<s",
        "</",
        "\u2581a\u2581\u2581b",
    ]
    texts += [
        "\u00ff\u00fe\u0080",
        "\u00c3\u00a9",
        "\U0010ffff\ufdd0\ue000",
        "\u2028x\u2029y\x85z\x0bw",
    ]
    for token in tokenizer.special_tokens:
        texts += [token, f"a{token}b", f" {token} {token}", token[:-1], token + token[1:]]
    return [text.encode() for text in texts] + _random_texts()


def _random_texts() -> list[bytes]:
    """Return seeded random strings over the whole of Unicode and over what is common in text."""
    generator = np.random.Generator(np.random.PCG64(20260101))
    texts = []
    for top in (0x7F, 0xFF, 0x24F, 0x6FF, 0x2FFF, 0xFFFF, 0x10FFFF):
        for length in (3, 50, 400):
            points = generator.integers(0, top + 1, size=length)
            points[(points >= 0xD800) & (points <= 0xDFFF)] = 0x20
            points[generator.random(length) < 0.15] = 0x20
            texts.append("".join(map(chr, points)).encode())
    return texts
