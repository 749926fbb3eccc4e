"""Row 20: doubling a text of one repeated character less than triples the time it takes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from olm_data.encoders import make_encoder
from olm_data.encoders.base import concatenate
from olm_data.tokenizer.tokenizer import load_tokenizer


@pytest.mark.parametrize(
    ("encoder", "character"),
    [("hf", "a"), ("gigatoken", "a"), ("gigatoken", " "), ("gigatoken", "\u4f60")],
)
def test_20_time_grows_with_the_text_and_not_with_its_square(
    encoder: str, character: str, tiny_tokenizer: Path
) -> None:
    encode = make_encoder(encoder, load_tokenizer(tiny_tokenizer), "plain").encode

    def seconds(size: int) -> float:
        """Less of two: of this process only, so that others do not count."""
        buffers = concatenate([(character * (size // len(character.encode()))).encode()])
        took = []
        for _ in range(2):
            start = time.process_time()
            encode(*buffers)
            took.append(time.process_time() - start)
        return min(took)

    seconds(1000)
    # Doubled three times, as caches and a busy machine make one as slow as two: linear is 8,
    # quadratic 64. A hundredth of a second is the clock's.
    assert seconds(2_000_000) < 24 * seconds(250_000) + 0.01
