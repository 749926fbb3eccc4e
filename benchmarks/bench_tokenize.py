"""How much of the encoder's own speed does `olm-data tokenize` keep, and what bounds it?

    python benchmarks/bench_tokenize.py --megabytes 40 --encoder hf
    python benchmarks/bench_tokenize.py --megabytes 200 --encoder gigatoken
    python benchmarks/bench_tokenize.py --fixed

On the same text, in the same run, with the same number of processes, for parquet, plain .jsonl,
.jsonl.zst and .jsonl.gz:

* `encoder`: the encoder plug-in alone over buffers already in memory (no reading, no writing);
* `reading`: a bare loop that reads, decompresses and parses to text buffers, with the libraries
  alone (no checks, no accounting);
* `bare loop` (gigatoken only): its own `encode_files` over the same files and one write of the ids,
  processes and imports included;
* `tasks`: what the command says its tasks took: the pipe without start-up;
* `command`: all of `olm-data tokenize`: start-up, parity gate, digests, ends, provenance, count of
  duplicates and fsync included.

First the command alone, on 1 kB of text: what it costs beside its work. With --fixed that is all.
So byte code is cached, as after an installation, and the proof of the encoder is in the user's
cache, before anything else is timed.

`cpu` is user and system time of all processes, which other work on the machine changes least.
Then, in one process and one thread, the share of each stage of the pipe.

Text is the files under --corpus (.py, .md, .rst, .txt, .jsonl.zst, .jsonl.gz, .json.gz, .parquet;
default: the corpora beside the checkout, else the Python standard library), repeated to the size
asked for. Prints medians and ratios.

    python benchmarks/bench_tokenize.py --peers --tokenizer gpt2/tokenizer.json --megabytes 20

With --peers: other tools beside ours; peers/token_writers/driver.py says what is measured, how.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
from peers.token_writers import driver
from tokenizing.inputs import (
    KINDS,
    corpus,
    decompressed,
    read_source,
    texts_of,
    whole_lines,
    write_inputs,
)

from olm_data.bounded_json import sha256_file
from olm_data.dataset.shard_writer import ShardWriter
from olm_data.encoders import ENCODERS, make_encoder
from olm_data.errors import OlmError
from olm_data.select.selection import content_hashes, document_digests
from olm_data.sources import SourceRequest, resolve_source
from olm_data.storage.store import Store
from olm_data.tokenization.batches import delimit, document_rows
from olm_data.tokenizer.tokenizer import load_tokenizer

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"  # where there is such a folder


def in_processes(count: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run work(rank, count, *args) in `count` fresh processes; return their results."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(count) as pool:
        return pool.starmap(work, [(rank, count, *args) for rank in range(count)])


def encoder_alone(
    rank: int, count: int, paths: list[str], tokenizer: str, name: str
) -> tuple[float, float]:
    """Return wall and CPU seconds of encoding this process's share of the files from memory."""
    encoder = ENCODERS[name](load_tokenizer(tokenizer), "plain")
    batches = list(read_source(resolve_source(SourceRequest(inputs=tuple(paths[rank::count])))))
    start, used = time.perf_counter(), time.process_time()
    for batch in batches:
        encoder.encode(batch.data, batch.offsets)
    return time.perf_counter() - start, time.process_time() - used


class Line(msgspec.Struct, gc=False):
    """The one field that is wanted."""

    text: str


def reading_alone(rank: int, count: int, paths: list[str]) -> tuple[float, float]:
    """Return wall and CPU seconds of reading this process's files to text buffers, no more."""
    decoder = msgspec.json.Decoder(Line)
    start, used = time.perf_counter(), time.process_time()
    for path in paths[rank::count]:
        if path.endswith(".parquet"):
            for batch in pq.ParquetFile(path).iter_batches(columns=["text"], use_threads=False):
                batch.column(0).buffers()
            continue
        for lines in whole_lines(path):
            texts = [record.text.encode() for record in decoder.decode_lines(lines)]
            b"".join(texts)
    return time.perf_counter() - start, time.process_time() - used


def decompressing_alone(paths: list[str]) -> float:
    """Return the CPU seconds of decompression; parquet: decompression and decoding of pages."""
    start = time.process_time()
    for path in paths:
        if path.endswith(".parquet"):
            for _ in pq.ParquetFile(path).iter_batches(columns=["text"], use_threads=False):
                pass
        else:
            for _ in decompressed(path):
                pass
    return time.process_time() - start


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


def stage_seconds(
    paths: list[str], tokenizer_path: str, name: str, folder: Path
) -> dict[str, float]:
    """Return CPU seconds of each stage, one process, one thread, stage by stage."""
    seconds = dict.fromkeys(("decompress", "parse", "encode", "hash", "write"), 0.0)
    tokenizer = load_tokenizer(tokenizer_path)
    encoder = make_encoder(name, tokenizer, "plain")
    store = Store(folder)

    def timed(stage: str, work: Callable[..., Any], *args: Any) -> Any:
        start = time.process_time()
        result = work(*args)
        seconds[stage] += time.process_time() - start
        return result

    with store.staging() as staging:
        writer = ShardWriter(
            store,
            "shard-00000",
            dtype=tokenizer.dtype,
            vocab_size=tokenizer.vocab_size,
            staging=staging,
        )
        batches = read_source(resolve_source(SourceRequest(inputs=tuple(paths))))
        while (batch := timed("parse", next, batches, None)) is not None:
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
    before = seconds["hash"]
    for path in folder.glob("shard-00000.*"):
        timed("hash", sha256_file, path)
    seconds["write"] -= seconds["hash"] - before  # the commit took it, for the same files
    seconds["decompress"] = decompressing_alone(paths)
    seconds["parse"] -= seconds["decompress"]
    return seconds


MEASURED = """
import ctypes, json, os, resource, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this
start = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE)
wall = time.perf_counter() - start
try:
    while True:
        os.wait()
except ChildProcessError:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
said = done.stdout.decode().splitlines()
print(json.dumps({"wall": wall, "cpu": usage.ru_utime + usage.ru_stime, "last": said[-1:]}))
sys.exit(done.returncode)
"""


def cpu_of_children() -> float:
    """Return user and system seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def command(paths: list[str], tokenizer: str, name: str, workers: int, output: Path) -> Any:
    """Run `olm-data tokenize` as a process of its own; return its result with "wall" and "cpu"."""
    done = subprocess.run(
        [
            *(sys.executable, "-c", MEASURED),
            *(sys.executable, "-m", "olm_data.cli", "tokenize", *paths, "--allow-duplicates"),
            *("--tokenizer", tokenizer, "--output", str(output)),
            *("--encoder", name, "--workers", str(workers), "--json"),
        ],
        check=True,
        stdout=subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
    )
    measured = json.loads(done.stdout)
    return json.loads(measured["last"][0]) | measured


def main() -> None:
    """Parse options, prepare the inputs, run everything in turn and print one line each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--corpus", type=Path)
    gpt2 = DATA / "tokenizers" / "gpt2" / "tokenizer.json"
    parser.add_argument(
        "--tokenizer",
        **{"default": str(gpt2)} if gpt2.is_file() else {"required": True},
        help="tokenizer.json  (default: that of GPT-2 beside the checkout)",
    )
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--encoder", choices=["hf", "gigatoken"], default="hf")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of files, with commas")
    parser.add_argument("--fixed", action="store_true", help="only what the command costs at 1 kB")
    driver.add_options(parser)
    args = parser.parse_args()
    if args.peers:
        raise SystemExit(driver.run_peers(args, texts_of))
    measure_fixed(args)
    if args.fixed:
        return
    beside = DATA / "corpora" if (DATA / "corpora").is_dir() else None
    base = list(corpus(args.corpus or beside or Path(sysconfig.get_path("stdlib"))))
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
        for kind, paths in write_inputs(texts, folder, args.kinds.split(",")).items():
            measure(kind, paths, total, args, folder)


def measure_fixed(args: Any) -> None:
    """Measure the command on one document of 1 kB and print what it costs."""
    wall, cpu = [], []
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "one.jsonl")
        file.write_text(json.dumps({"text": "a word " * 140}) + "\n")
        for run in range(args.runs + 1):
            output = Path(name, f"out-{run}")
            result = command([str(file)], args.tokenizer, args.encoder, args.workers, output)
            if run:  # the first one compiles and proves
                wall.append(result["wall"])
                cpu.append(result["cpu"])
    print(
        f"1 kB, {args.encoder}, {args.workers} workers: {statistics.median(wall):.2f} s "
        f"({min(wall):.2f} to {max(wall):.2f}), cpu {statistics.median(cpu):.2f} s"
    )


def measure(kind: str, paths: list[str], total: float, args: Any, folder: Path) -> None:
    """Measure one kind of input and print it."""
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}

    def note(label: str, seconds: float, of_processor: float | None = None) -> None:
        wall.setdefault(label, []).append(seconds)
        if of_processor is not None:
            cpu.setdefault(label, []).append(of_processor)

    tokens = 0
    for run in range(args.runs):
        shares = in_processes(args.workers, encoder_alone, paths, args.tokenizer, args.encoder)
        note("encoder", max(took for took, _ in shares), sum(used for _, used in shares))
        shares = in_processes(args.workers, reading_alone, paths)
        note("reading", max(took for took, _ in shares), sum(used for _, used in shares))
        counts: list[int] = []
        if args.encoder == "gigatoken":
            out = str(folder / "bare")
            before, start = cpu_of_children(), time.perf_counter()
            counts = in_processes(args.workers, bare_loop, paths, args.tokenizer, out)
            note("bare loop", time.perf_counter() - start, cpu_of_children() - before)
        output = folder / f"{kind}-{run}"
        result = command(paths, args.tokenizer, args.encoder, args.workers, output)
        note("tasks", result["seconds"])
        note("command", result["wall"], result["cpu"])
        tokens = result["tokens"]
        if counts and sum(counts) + result["documents"] != tokens:  # ours adds one EOS a document
            raise OlmError(f"token counts differ: {sum(counts)} + {result['documents']}, {tokens}")
        shutil.rmtree(output)
    print(f"\n{kind}: {tokens:,} tokens")
    middle = {label: statistics.median(seconds) for label, seconds in wall.items()}
    for label, seconds in middle.items():
        used = f"  cpu {statistics.median(cpu[label]):6.2f} s" if label in cpu else ""
        print(
            f"  {label:10} {seconds:7.2f} s  {total / seconds:7.1f} MB/s  "
            f"{tokens / seconds / 1e6:6.2f} Mtok/s{used}"
        )
    for above, below in (
        ("encoder", "command"),
        ("encoder", "tasks"),
        ("reading", "tasks"),
        ("bare loop", "command"),
    ):
        if above in middle:
            line = f"  {below:7} / {above:9} {middle[above] / middle[below]:.2f} of its speed"
            if above in cpu and below in cpu:
                line += (
                    f", {statistics.median(cpu[above]) / statistics.median(cpu[below]):.2f} by CPU"
                )
            print(line)
    spent = stage_seconds(paths, args.tokenizer, args.encoder, folder / f"stages-{kind}")
    whole = sum(spent.values())
    print(
        "  stages, one thread: "
        + ", ".join(f"{k} {100 * v / whole:.1f} %" for k, v in spent.items())
        + f"; {total / whole:.1f} MB/s"
    )


if __name__ == "__main__":
    main()
