"""How fast does the loader hand out tokens, and how long and how big does it start?

    python benchmarks/bench_loader.py            # both parts, about two minutes and 1 GB of disk
    python benchmarks/bench_loader.py --quick    # smaller data, fewer rounds
    python benchmarks/bench_loader.py --only start-up --sequence-length 4096
    python benchmarks/bench_loader.py --peers    # other projects' loaders; installs them first

Throughput, one thread, warm cache, all on the same rows of the same mixture in the same process,
rounds taken in turn, the best of each (other work on the machine only ever slows a round):

    gather     bare NumPy, two ways to write it: one slice a row, then inputs and labels as int64
               into arrays made once. The same bytes, nothing of documents. The faster way counts.
    labels     ours: order, borders, input_ids and labels
    fields     ours: all fields of a batch, documents as offsets
    positions  ours: fields, and for each token its place in its document and where that begins
    loader     ours: `DataLoader` without a thread, as tensors
    torch      a plain torch DataLoader over the memory map (num_workers=0)

Start-up: sparse datasets of 10^8 to 10^13 tokens in up to 100,000 shards and 1,000 sources, each
measured in a fresh process: seconds from the import to the first batch of 64 rows, and the peak of
resident memory above the idle interpreter with NumPy. The largest one is then read by 10,000
simulated ranks. See `peers.loaders.scale`.

With --peers: other projects' loaders over the same rows instead. See `peers.loaders.driver`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from peers.loaders import driver, scale
from peers.loaders.documents import documents

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

WEIGHTS = (4, 3, 2, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["throughput", "start-up"])
    parser.add_argument("--quick", action="store_true", help="smaller data, fewer rounds")
    parser.add_argument("--tokens", type=int, default=64_000_000, help="tokens of the mixture read")
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=64, help="rows of a micro-batch")
    parser.add_argument("--document", type=int, default=900, help="mean tokens of a document")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    driver.add_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds = min(options.tokens, 16_000_000), min(options.rounds, 5)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.peers:
        raise SystemExit(driver.run_peers(options))
    results: dict[str, Any] = {}
    if options.only != "start-up":
        with tempfile.TemporaryDirectory(prefix="olm-bench-") as folder:
            results["throughput"] = throughput(Path(folder), options)
    if options.only != "throughput":
        results["start_up"] = list(scale.measure_sizes(options))
    if options.json:
        print(json.dumps(results))
    else:
        show(results)


def throughput(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Return million tokens a second of each contestant."""
    import torch

    from olm_data.rows.reader import RowReader
    from olm_train.data import DataLoader

    torch.set_num_threads(1)
    length, batch = options.sequence_length, options.batch
    lock, streams = make_mixture(folder, options)
    reader = RowReader(lock)
    rows = np.arange(reader.total_rows // batch * batch)
    place = reader.schedule.locate(rows)
    windows = [  # (memory map of a whole source, first token) of each row
        (streams[source], row * length)
        for source, row in zip(place.source.tolist(), place.row.tolist(), strict=True)
    ]

    buffer = np.empty((batch, length + 1), np.uint16)
    ids, labels = (np.empty((batch, length), np.int64) for _ in range(2))

    def gather_through_a_buffer() -> Iterator[Any]:
        for i in range(0, len(windows), batch):
            for k, (stream, first) in enumerate(windows[i : i + batch]):
                buffer[k] = stream[first : first + length + 1]
            ids[...] = buffer[:, :-1]
            labels[...] = buffer[:, 1:]
            yield ids

    def gather_directly() -> Iterator[Any]:
        for i in range(0, len(windows), batch):
            for k, (stream, first) in enumerate(windows[i : i + batch]):
                ids[k] = stream[first : first + length]
                labels[k] = stream[first + 1 : first + length + 1]
            yield ids

    def ours_labels() -> Iterator[Any]:
        for i in range(0, len(rows), scale.AHEAD):
            ahead = reader.prepare(rows[i : i + scale.AHEAD])
            for j in range(0, len(ahead), batch):
                yield ahead.read_tokens(j, j + batch)[0]

    def ours_fields() -> Iterator[Any]:
        for i in range(0, len(rows), scale.AHEAD):
            ahead = reader.prepare(rows[i : i + scale.AHEAD])
            for j in range(0, len(ahead), batch):
                yield ahead.read(j, j + batch).input_ids

    sizes = {"global_batch_size": batch * length, "rank_microbatch_size": batch * length}
    ours = DataLoader(lock, prefetch=0, **sizes)
    begin = ours.state_dict()

    def ours_positions() -> Iterator[Any]:
        for i in range(0, len(rows), scale.AHEAD):
            ahead = reader.prepare(rows[i : i + scale.AHEAD])
            for j in range(0, len(ahead), batch):
                read = ahead.read(j, j + batch)
                assert read.positions.shape == read.doc_start.shape
                yield read.input_ids

    def ours_loader() -> Iterator[Any]:
        ours.load_state_dict(begin)
        for (micro_batch,) in ours:
            yield micro_batch.input_ids

    class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
        def __len__(self) -> int:
            return len(windows)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            stream, first = windows[index]
            tokens = torch.from_numpy(stream[first : first + length + 1].astype(np.int64))
            return tokens[:-1], tokens[1:]

    plain = torch.utils.data.DataLoader(Rows(), batch_size=batch, num_workers=0)

    def torch_loader() -> Iterator[Any]:
        for inputs, _ in plain:
            yield inputs

    contestants: dict[str, Callable[[], Iterator[Any]]] = {
        "gather directly": gather_directly,
        "gather through a buffer": gather_through_a_buffer,
        "labels": ours_labels,
        "fields": ours_fields,
        "positions": ours_positions,
        "loader": ours_loader,
        "torch": torch_loader,
    }
    check_equal(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, contestant in contestants.items():
            begun = time.perf_counter()
            for _ in contestant():
                pass
            seconds[name].append(time.perf_counter() - begun)
    tokens = len(rows) * length / 1e6
    return {name: tokens / min(times) for name, times in seconds.items()}


def check_equal(contestants: dict[str, Callable[[], Iterator[Any]]]) -> None:
    """Every contestant hands out the same tokens; this also warms the cache and checks blocks."""
    sums = {
        name: [int(np.asarray(inputs).sum()) for inputs in contestant()]
        for name, contestant in contestants.items()
    }
    assert all(other == sums["torch"] for other in sums.values()), "contestants read other rows"


def make_mixture(folder: Path, options: argparse.Namespace) -> tuple[Path, list[np.ndarray]]:
    """Write four sources of several shards; return the lock and a memory map of each source."""
    from support.small_datasets import write_mixture

    from olm_data.dataset.dataset import Dataset

    rng = np.random.default_rng(0)
    sources = {}
    shards = 4
    for index, weight in enumerate(WEIGHTS):
        each = int(options.tokens * weight / sum(WEIGHTS) / shards) + options.sequence_length + 1
        sources[f"source-{index}"] = [documents(rng, each, options.document) for _ in range(shards)]
    step = options.batch * options.sequence_length
    whole = options.tokens // step * step
    lock = write_mixture(
        folder,
        sources,
        stages=[(whole, dict(zip(sources, WEIGHTS, strict=True)))],
        sequence_length=options.sequence_length,
    )
    streams = []
    for name in sources:
        dataset = Dataset.open(str(folder / name))
        dataset.read(0, dataset.tokens).tofile(folder / f"{name}.bin")
        streams.append(np.asarray(np.memmap(folder / f"{name}.bin", np.uint16, "r")))
    return lock, streams


def show(results: dict[str, Any]) -> None:
    if "throughput" in results:
        speed = results["throughput"]
        bare = max(speed["gather directly"], speed["gather through a buffer"])
        print("million tokens/s, one thread, warm cache        x bare gather   x torch DataLoader")
        for name, value in speed.items():
            ratios = f"{value / bare:15.2f} {value / speed['torch']:20.1f}"
            print(f"  {name:28} {value:10.0f} {ratios:>36}")
    scale.show(results.get("start_up", []))


if __name__ == "__main__":
    main()
