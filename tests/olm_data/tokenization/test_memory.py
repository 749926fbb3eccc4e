"""A worker's memory is bounded by its batches, whatever the size of its input."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.tokenizing import texts

SMALL = 6_000_000  # bytes of text: enough to fill every queue between the stages
TOLERANCE = 36 << 20
"""Bytes that 54 MB more of text may add. Measured: 8 to 23 MiB, as blocks of 4 MiB are read and
the allocators keep some; to hold on to the text would add 51 MiB, to its ids twice that."""

SCRIPT = """
import io, sys

import msgspec
from dataclasses import replace
from pathlib import Path
from support.tokenizing import make_request
from olm_data.progress import Progress
from support.inline_runner import InlineRunner
from olm_data.tokenization.tokenize import tokenize

request = make_request(
    [sys.argv[1]], Path(sys.argv[2]), sys.argv[3], shard_tokens=10**9, encoder="gigatoken"
)
# so that queues are soon full
options = msgspec.structs.replace(request.source.options, batch_bytes=1 << 18)
request = replace(request, source=replace(request.source, options=options))
made = tokenize(
    request,
    runner=InlineRunner(),
    progress=Progress("tokenize", stream=io.StringIO()),
)
assert len(made.manifest.shards) == 1
# not ru_maxrss, which begins with the memory of the process that started this one
peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
print(made.manifest.totals.text_bytes, int(peak) * 1024)
"""


def write(path: Path, size: int) -> Path:
    """Write documents of about 2 KB, `size` bytes in all."""
    documents = [" ".join(texts(40, 40 * n)) for n in range(200)]
    chosen = documents * (size // sum(map(len, documents)) + 1)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": chosen}), path, row_group_size=500)
    else:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in chosen).encode()
        path.write_bytes(gzip.compress(lines, 1) if path.suffix == ".gz" else lines)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_ten_times_the_input_takes_no_more_memory(
    kind: str, tiny_tokenizer: Path, tmp_path: Path, repository: Path
) -> None:
    def peak(size: int) -> tuple[int, int]:
        source = write(tmp_path / f"{size}.{kind}", size)
        output = tmp_path / f"out-{size}"
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(source), str(tiny_tokenizer), str(output)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=os.environ | {"PYTHONPATH": f"{repository}{os.pathsep}{repository / 'tests'}"},
        )
        text_bytes, rss = map(int, done.stdout.split())
        return text_bytes, rss

    small, peak_of_small = peak(SMALL)
    large, peak_of_large = peak(10 * SMALL)
    assert large > 9 * small
    assert peak_of_large < peak_of_small + TOLERANCE
