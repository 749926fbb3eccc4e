"""Deterministic changes to bytes: flips, cuts, copies and odd words, to replay without a fuzzer."""

from __future__ import annotations

import random

WORDS = [
    *(b"\x00", b"\xff", b"\x7f\xff\xff\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80"),
    *(b"-1", b"1e999", b"NaN", b"9" * 40, b"18446744073709551616", b"null", b"true", b"[]", b"{}"),
    *(b'"', b"'", b"`", b"\\", b"\\ud800", b"\n", b"\r\n", b": ", b"&a *a", b"!!python/object:x"),
    *(b"(" * 300, b"[" * 300, b'{"a":' * 300, b"not " * 300, b"../../x", b"\x1b[2J"),
]


def mutated(seed: bytes, number: int) -> bytes:
    """Return change number `number` of the seed; the same for the same arguments."""
    choose = random.Random(number)
    data = bytearray(seed)
    for _ in range(choose.choice([1, 1, 2, 5])):
        at = choose.randrange(len(data) + 1)
        stop = min(len(data), at + choose.choice([1, 1, 4, 16, 64]))
        kind = choose.randrange(5)
        if kind == 0 and at < len(data):
            data[at] = choose.randrange(256)
        elif kind == 1:
            del data[at:stop]
        elif kind == 2:
            data[at:at] = choose.choice(WORDS)
        elif kind == 3:
            data[at:stop] = choose.choice(WORDS)
        else:
            data[at:at] = data[at:stop] * choose.choice([1, 3])
    return bytes(data)
