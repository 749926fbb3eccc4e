"""Row 19: one very long line is read and encoded in memory in proportion to it, not more."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import WITH_TESTS, environment

SIZE = 30_000_000
WORDS = "It was a bright cold day in April, and the clocks were striking 13.\n\u00e9 "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("long")
    text = WORDS * (SIZE // len(WORDS.encode()))
    line = json.dumps({"text": text}, ensure_ascii=False).encode() + b'\n{"text": "after"}\n'
    (place / "a.jsonl").write_bytes(line)
    (place / "b.jsonl.gz").write_bytes(gzip.compress(line, 1))
    (place / "c.txt").write_text(text)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.txt"])
def test_a_document_of_thirty_megabytes_is_read_and_encoded_in_bounded_memory(
    folder: Path, tiny_tokenizer: Path, name: str
) -> None:
    script = f"""
from support.memory import peak
from olm_data.encoders import make_encoder
from olm_data.sources import plan_units, read_units
from support.reading import resolve_source
from olm_data.tokenizer.tokenizer import load_tokenizer
encoder = make_encoder("gigatoken", load_tokenizer({str(tiny_tokenizer)!r}), "plain")
before = peak()
plan = resolve_source([{str(folder / name)!r}])
units = [u for i, f in enumerate(plan.inputs) for u in plan_units(i, f, plan.options, 1 << 20)]
size = tokens = 0
for batch in read_units(plan.inputs, units, plan.options):
    size += len(batch.data)
    tokens += len(encoder.encode(batch.data, batch.offsets).ids)
print(size, tokens, (peak() - before) * 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(WITH_TESTS),
        capture_output=True,
        text=True,
        check=True,
    )
    size, tokens, grown = map(int, done.stdout.split())
    assert size >= SIZE - len(WORDS.encode())
    assert tokens > size // 8
    # The line, its text, its bytes, their copy in a batch, and four bytes a token twice.
    assert grown < 6 * size + 8 * tokens + (64 << 20)
