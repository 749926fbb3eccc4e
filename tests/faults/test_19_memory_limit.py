"""Row 19: a line of 60 MB becomes a dataset under a memory limit that the kernel enforces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SIZE = 60_000_000
WORDS = "It was a bright cold day in April, and the clocks were striking 13.\n\u00e9 "
FIXED = 700 << 20  # the libraries' pools and threads; measured with an empty document: 500 MiB
PER_BYTE = 10  # line, its text, UTF-8, the batch, ids at 4 bytes each in two forms

SCRIPT = """
import resource, sys
from pathlib import Path
from support.tokenizing import make_dataset, write_jsonl, texts

source, tokenizer, folder = map(Path, sys.argv[1:4])
room = int(sys.argv[4])
small = write_jsonl(folder / "small.jsonl", texts(5))
make_dataset([small], tokenizer, folder / "small", encoder="gigatoken")  # all libraries are loaded
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
made = make_dataset([source], tokenizer, folder / "out", encoder="gigatoken")
print(made.manifest.totals.documents, made.manifest.totals.text_bytes, made.manifest.totals.tokens)
"""


@pytest.mark.slow
def test_19_a_line_of_sixty_megabytes_is_one_document_under_a_memory_limit(
    tiny_tokenizer: Path, tmp_path: Path, repository: Path
) -> None:
    text = WORDS * (SIZE // len(WORDS.encode()))
    size = len(text.encode())
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False))
    room = FIXED + PER_BYTE * size
    done = subprocess.run(
        [
            *(sys.executable, "-c", SCRIPT, str(tmp_path / "a.jsonl"), str(tiny_tokenizer)),
            *(str(tmp_path), str(room)),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{repository}:{repository / 'tests'}"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    documents, text_bytes, tokens = map(int, done.stdout.split())
    assert (documents, text_bytes) == (1, size)
    assert tokens > size // 8
