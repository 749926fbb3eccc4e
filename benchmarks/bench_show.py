"""How long does it take to find a step's documents, or a document's steps, over 10^12 tokens?

    python benchmarks/bench_show.py                    # 10,000 shards of 10^8 tokens
    python benchmarks/bench_show.py --shards 100000    # 10^13 tokens

Sparse shards of zeros with real document ends and ids; nothing but the lock, the manifests and the
shards lies on disk, so no index can help. Each line is a whole command in a fresh process, start-up
of Python included, the round of least CPU time: seconds on the clock, and of the CPU (other work on
the machine slows only the first). What grows with what:

    step         with the manifests of the sources in the step, and the shards its rows touch
    address      with one source's manifest; one shard is opened
    --id         with all shards of a source: the ids of each are read until enough are found (the
                 one asked for is in none); one round
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

SOURCES, SHARD_TOKENS, SHARD_DOCUMENTS, SEQUENCE = 4, 10**8, 100_000, 4096
STEP_ROWS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shards", type=int, default=10_000, help="over four sources")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to put the shards; default: a temporary folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="olm-bench-", dir=options.folder) as folder:
        lock = make_lock(Path(folder), options.shards)
        batch = ("--global-batch", str(STEP_ROWS * SEQUENCE))
        middle = options.shards // SOURCES // 2
        step = str(options.shards * SHARD_TOKENS // (STEP_ROWS * SEQUENCE))  # of twice as many
        commands = {
            "start-up of Python and the lock (--help)": ("step", "--help"),
            "step, 1 row": ("step", step, *batch, "--first", "1"),
            "step, all 64 rows": ("step", step, *batch),
            "document by address": ("document", f"source-0:shard-{middle:05d}:77777", *batch),
            "document by id, in no shard of one source": (
                "document",
                "--id",
                "nowhere",
                "--of",
                "source-0",
            ),
        }
        results = {}
        for name, arguments in commands.items():
            rounds = 1 if "--id" in arguments else options.rounds
            taken = (seconds(lock, arguments) for _ in range(rounds))
            results[name] = min(taken, key=lambda pair: pair[1])
    tokens = options.shards * SHARD_TOKENS
    if options.json:
        print(json.dumps({"tokens": tokens, "shards": options.shards, "seconds": results}))
        return
    print(f"{tokens:.0e} tokens in {options.shards:,} shards of {SOURCES} sources")
    for name, (clock, cpu) in results.items():
        print(f"  {clock:7.2f} s   CPU {cpu:7.2f} s   {name}")


def make_lock(folder: Path, shards: int) -> Path:
    """Make four sparse sources of `shards` shards in all, and a lock that draws on each twice."""
    from support.small_datasets import write_sparse_dataset
    from support.small_tokenizer import train

    from olm_data.dataset.docs import DOCS, docs_schema
    from olm_data.dataset.manifest import MANIFEST, read_manifest
    from olm_data.dataset.tokenizer import TOKENIZER, TokenizerInfo
    from olm_data.mixture.mix import mix
    from olm_data.storage.store import Store
    from olm_data.tokenizer.tokenizer import spec_from_bytes

    data = train(folder / "tokenizer.json").read_bytes()
    spec = spec_from_bytes(data, name="test", eos="none", bos="none")
    info = TokenizerInfo(spec.sha256, spec.sha256, spec.vocab_size, None, None, "plain")
    number = np.arange(SHARD_DOCUMENTS)
    columns = {
        "id": pa.array([f"doc-{n}" for n in number]),
        "input": pa.array(np.zeros(SHARD_DOCUMENTS, np.int32)),
        "position": pa.array(number),
        "text_bytes": pa.array(np.full(SHARD_DOCUMENTS, 4000)),
        "content_hash": pa.array(number.astype(np.uint64)),
    }
    docs = folder / "docs.parquet"
    table = pa.table(columns, schema=docs_schema())
    pq.write_table(table, docs, row_group_size=65_536, compression="zstd")
    names = [f"source-{i}" for i in range(SOURCES)]
    for name in names:
        path = folder / name
        write_sparse_dataset(
            path, shards=shards // SOURCES, tokens=SHARD_TOKENS, documents=SHARD_DOCUMENTS
        )
        copy = path / "docs.copy"  # a file has 65,000 names at most
        copy.write_bytes(docs.read_bytes())
        for index in range(shards // SOURCES):
            os.link(copy, path / f"shard-{index:05d}{DOCS}")
        (path / TOKENIZER).write_bytes(data)
        manifest = read_manifest(Store(str(path)))
        manifest = msgspec.structs.replace(manifest, tokenizer=info)
        manifest = msgspec.structs.replace(manifest, digest=manifest.compute_digest())
        (path / MANIFEST).write_bytes(manifest.encode())
    text = {
        "version": 1,
        "seed": 1,
        "sequence_length": SEQUENCE,
        "packing": "concat",
        "sources": {name: {"data": f"./{name}", "max_epochs": 4} for name in names},
        "stages": [
            {
                "name": "main",
                "tokens": 2 * shards * SHARD_TOKENS,
                "weights": {name: weight for weight, name in enumerate(names, start=1)},
            }
        ],
    }
    (folder / "manifest.yaml").write_text(json.dumps(text))
    return Path(mix(str(folder / "manifest.yaml")).path)


def seconds(lock: Path, arguments: tuple[str, ...]) -> tuple[float, float]:
    """Return how long a command takes in a fresh process: on the clock, and of the CPU."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-m", "olm_data.cli", "show", arguments[0], str(lock), *arguments[1:]],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    taken = time.perf_counter() - begun
    missing = "no document has the id" in run.stderr
    assert run.returncode == 0 or missing, run.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return taken, cpu


if __name__ == "__main__":
    main()
