"""How much of the encoder's own speed does `olm-data tokenize` keep?

    python benchmarks/bench_tokenize.py --megabytes 40 --encoder hf
    python benchmarks/bench_tokenize.py --megabytes 200 --encoder gigatoken

On the same text, in the same run, with the same number of processes:

* `encoder`: the encoder plug-in alone over buffers already in memory (no reading, no writing);
* `bare` (gigatoken only): its own `encode_files` over the same files plus one write of the ids;
* `olm-data tokenize`: the whole command, start-up, digests, ends, provenance and fsync included.

Text is the files under --corpus (.py, .md, .rst, .txt, .jsonl.zst, .jsonl.gz, .json.gz, .parquet;
default: the Python standard library), repeated to the size asked for. Prints medians and ratios.

    python benchmarks/bench_tokenize.py --peers --tokenizer gpt2/tokenizer.json --megabytes 20

With --peers: other tools beside ours; see peers/driver.py for what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from peers import driver

from olm_data.dataset import Dataset
from olm_data.digests import content_hashes, document_digests
from olm_data.encoders import ENCODERS, make_encoder
from olm_data.errors import OlmError
from olm_data.pipeline import delimit, document_rows
from olm_data.shard import ShardWriter
from olm_data.sources import plan_units, read_units, resolve_source
from olm_data.sources.base import DocumentBatch
from olm_data.store import Store
from olm_data.tokenizer import load_tokenizer

PARTS = 16  # files of each kind: a compressed file is read by one process


def corpus(folder: Path) -> Iterator[str]:
    """Yield the texts of every readable file under `folder`, installed packages left out."""
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        if "site-packages" not in path.relative_to(folder).parts:
            yield from texts_of(path)


def texts_of(path: Path) -> Iterator[str]:
    """Yield the texts of one file; nothing for a file of another kind."""
    if path.suffix in (".py", ".md", ".rst", ".txt"):
        text = path.read_bytes().decode("utf-8", "replace")
        if text.strip():
            yield text
    elif path.name.endswith((".jsonl.zst", ".jsonl.gz", ".json.gz", ".parquet")):
        names = pq.read_schema(path).names if path.suffix == ".parquet" else []
        column = "content" if "content" in names else "text"
        source = resolve_source([str(path)], text_column=column)
        for batch in read_source(source):
            yield from (batch.text(k) for k in range(batch.documents))


def read_source(source: Any) -> Iterator[DocumentBatch]:
    """Yield all batches of a resolved source."""
    units = [
        unit
        for index, file in enumerate(source.inputs)
        for unit in plan_units(index, file, source.options, 64 << 20)
    ]
    yield from read_units(source.inputs, units, source.options)


def write_inputs(texts: list[str], folder: Path) -> dict[str, list[str]]:
    """Write the texts as PARTS .jsonl.zst and PARTS .parquet files; return the paths by kind."""
    paths: dict[str, list[str]] = {"jsonl.zst": [], "parquet": []}
    for part in range(PARTS):
        chosen = texts[part::PARTS]
        path = folder / f"part-{part:02d}.jsonl.zst"
        lines = "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in chosen)
        path.write_bytes(zstandard.ZstdCompressor(3).compress(lines.encode()))
        paths["jsonl.zst"].append(str(path))
        path = folder / f"part-{part:02d}.parquet"
        pq.write_table(pa.table({"text": chosen}), path, compression="zstd", row_group_size=1000)
        paths["parquet"].append(str(path))
    return paths


def in_processes(count: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run work(rank, count, *args) in `count` fresh processes; return their results."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(count) as pool:
        return pool.starmap(work, [(rank, count, *args) for rank in range(count)])


def encoder_alone(
    rank: int, count: int, paths: list[str], tokenizer: str, name: str
) -> tuple[int, float]:
    """Return (bytes, seconds) of encoding this process's share of the files from memory."""
    encoder = ENCODERS[name](load_tokenizer(tokenizer), "plain")
    batches = list(read_source(resolve_source(paths[rank::count])))
    start = time.perf_counter()
    for batch in batches:
        encoder.encode(batch.data, batch.offsets)
    return sum(len(b.data) for b in batches), time.perf_counter() - start


def bare_loop(rank: int, count: int, paths: list[str], tokenizer: str, out: str) -> int:
    """Encode this process's files with gigatoken's own reader, write the ids, count them."""
    import gigatoken

    source = (
        gigatoken.ParquetFileSource(paths[rank::count])
        if paths[0].endswith(".parquet")
        else gigatoken.JsonlFileSource(paths[rank::count])
    )
    encoded = gigatoken.Tokenizer(tokenizer).encode_files(source, parallel=False)
    ids = np.asarray(encoded.layout.content.data).astype(np.uint16)
    ids.tofile(f"{out}.{rank}")
    return len(ids)


def stage_shares(
    paths: list[str], tokenizer_path: str, name: str, folder: Path
) -> dict[str, float]:
    """Return seconds spent reading, hashing, encoding and writing, one process, stage by stage."""
    seconds = dict.fromkeys(("read", "hash", "encode", "write"), 0.0)
    tokenizer = load_tokenizer(tokenizer_path)
    encoder = make_encoder(name, tokenizer, "plain")
    store = Store(folder)

    def timed(stage: str, work: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter()
        result = work(*args)
        seconds[stage] += time.perf_counter() - start
        return result

    with store.staging() as staging:
        writer = ShardWriter(
            store,
            "shard-00000",
            dtype=tokenizer.dtype,
            vocab_size=tokenizer.vocab_size,
            staging=staging,
        )
        batches = read_source(resolve_source(paths))
        while (batch := timed("read", next, batches, None)) is not None:
            hashes = timed(
                "hash", lambda b: content_hashes(document_digests(b.data, b.offsets)), batch
            )
            encoded = timed("encode", encoder.encode, batch.data, batch.offsets)
            chosen = np.ones(batch.documents, bool)

            def write(batch=batch, hashes=hashes, encoded=encoded, chosen=chosen) -> None:
                ids, offsets = delimit(
                    encoded.ids, encoded.offsets, chosen, bos=tokenizer.bos, eos=tokenizer.eos
                )
                writer.append(ids, offsets, document_rows(batch, hashes, None))

            timed("write", write)
        timed("write", lambda: writer.commit(plan="", units=[], dropped={}))
    return seconds


def command(paths: list[str], tokenizer: str, name: str, workers: int, output: Path) -> float:
    """Run `olm-data tokenize` as a process of its own; return its wall seconds."""
    start = time.perf_counter()
    subprocess.run(
        [
            *(sys.executable, "-m", "olm_data.cli", "tokenize", *paths),
            *("--tokenizer", tokenizer, "--output", str(output)),
            *("--encoder", name, "--workers", str(workers)),
        ],
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - start


def main() -> None:
    """Parse options, prepare the inputs, run everything in turn and print one line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json")
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--encoder", choices=["hf", "gigatoken"], default="hf")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--runs", type=int, default=3)
    driver.add_options(parser)
    args = parser.parse_args()
    if args.peers:
        raise SystemExit(driver.run_peers(args, texts_of))
    base = list(corpus(args.corpus or Path(sysconfig.get_path("stdlib"))))
    size = sum(len(t.encode()) for t in base)
    texts = (base * -(-args.megabytes * 10**6 // size))[
        : -(-len(base) * args.megabytes * 10**6 // size)
    ]
    total = sum(len(t.encode()) for t in texts) / 1e6
    print(
        f"{total:.0f} MB of text, {len(texts):,} documents, "
        f"{args.workers} processes, {args.encoder}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, paths in write_inputs(texts, folder).items():
            measure(kind, paths, total, args, folder)


def measure(kind: str, paths: list[str], total: float, args: Any, folder: Path) -> None:
    """Measure one kind of input and print it."""
    alone, whole, bare = [], [], []
    for run in range(args.runs):
        parts = in_processes(args.workers, encoder_alone, paths, args.tokenizer, args.encoder)
        alone.append(max(seconds for _, seconds in parts))
        output = folder / f"{kind}-{run}"
        whole.append(command(paths, args.tokenizer, args.encoder, args.workers, output))
        if args.encoder == "gigatoken":
            out = str(folder / "bare")
            start = time.perf_counter()
            counts = in_processes(args.workers, bare_loop, paths, args.tokenizer, out)
            bare.append(time.perf_counter() - start)
            documents, tokens = (
                Dataset.open(str(output)).documents,
                Dataset.open(str(output)).tokens,
            )
            if sum(counts) + documents != tokens:  # ours adds one EOS a document
                raise OlmError(f"token counts differ: {sum(counts)} + {documents} and {tokens}")
    tokens = Dataset.open(str(folder / f"{kind}-0")).tokens
    print(f"\n{kind}: {tokens:,} tokens")
    for label, seconds in (("encoder", alone), ("bare loop", bare), ("olm-data", whole)):
        if seconds:
            middle = statistics.median(seconds)
            print(
                f"  {label:10} {middle:7.2f} s  {total / middle:7.1f} MB/s  "
                f"{tokens / middle / 1e6:6.2f} Mtok/s"
            )
    print(f"  olm-data / encoder   {statistics.median(alone) / statistics.median(whole):.2f}")
    if bare:
        print(f"  olm-data / bare loop {statistics.median(bare) / statistics.median(whole):.2f}")
    shares = stage_shares(paths, args.tokenizer, args.encoder, folder / f"stages-{kind}")
    spent = sum(shares.values())
    print(
        "  stages, one process: "
        + ", ".join(f"{k} {100 * v / spent:.1f} %" for k, v in shares.items())
    )


if __name__ == "__main__":
    main()
