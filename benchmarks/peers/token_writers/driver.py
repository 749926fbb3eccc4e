"""`bench_tokenize.py --peers`: every peer on the same documents, in one run, one table a corpus.

    python benchmarks/bench_tokenize.py --peers --tokenizer gpt2/tokenizer.json --megabytes 20
    python benchmarks/bench_tokenize.py --peers --tokenizer gpt2/tokenizer.json --megabytes 200 \\
        --only olm-hf,olm-gigatoken,bare-gigatoken --runs 5 --corpora prose+code,multilingual
    python benchmarks/bench_tokenize.py --peers ... --profiles tweets,web,books

What is equal for all: the documents, the tokenizer.json, the number of processes, the CPUs (as many
as processes, by affinity), warm inputs on local disk, and that start-up counts. Peers take turns
within each run. Wall time is the median of --runs; MB/s is text (UTF-8 bytes of the documents) over
it. `start` is the wall time of a run over one short document a file: to compare peers measured at
different --megabytes, take MB / (wall - start). Tokens leave out EOS and BOS. Memory is the
largest of all runs: `mem` (anonymous and shared, shared pages once) and `rss`, see `measure`.
`temp` is what a peer leaves in its temporary folder. `ids`: every document of the first run against
ours. x hf, x giga: how many times faster ours is in this run (below 1: slower).

Text is cut from --corpus, by default ../shared/data/corpora beside the checkout, else the Python
standard library and package descriptions (which hold no many-language text); see `corpora`.

A peer gets --format where it reads it, else its own (the table says which), its documented fast
options, and an environment of its own under --peer-envs. A peer that cannot be installed, fails,
or runs past --limit is a line with the reason; exit code 1 where a peer failed or ids differ.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from peers import harness
from peers.environments import NotInstalled, last_line
from peers.harness import BENCHMARKS, choose, ready, surroundings
from peers.token_writers import (
    bare,
    compare,
    corpora,
    datatrove,
    dolma,
    litdata,
    measure,
    megatron,
    mosaicml,
    nanogpt,
    olm,
)
from peers.token_writers.base import Peer, Task

PEERS: tuple[Peer, ...] = tuple(
    peer
    for module in (olm, bare, litdata, mosaicml, nanogpt, datatrove, dolma, megatron)
    for peer in module.PEERS
)
SHARED_CORPORA = BENCHMARKS.parents[1] / "shared" / "data" / "corpora"
COLUMNS = "{:16}{:>9}  {:10}{:>8}{:>8}{:>8}{:>8}{:>9}{:>8}{:>8}{:>8}{:>7}{:>7}  {}"
HEADS = (
    "peer", "version", "input", "start s", "wall s", "MB/s", "Mtok/s", "mem MB", "rss MB", "out MB",
    "temp MB", "x hf", "x giga", "ids",
)  # fmt: skip


@dataclass
class Result:
    """What is known of one peer on one corpus."""

    peer: Peer
    version: str = ""
    input: str = ""
    start: float = 0.0
    runs: list[measure.Usage] = field(default_factory=list)
    output_bytes: int = 0
    scratch_bytes: int = 0
    prints: compare.Fingerprint | None = None
    failure: str = ""

    @property
    def seconds(self) -> float:
        """Median wall seconds."""
        return statistics.median(run.seconds for run in self.runs)


@dataclass(frozen=True)
class Corpus:
    """The documents of one table, as files of each format needed; `tiny`: one short one a file."""

    name: str
    bytes: int
    documents: int
    files: dict[str, list[str]]
    tiny: dict[str, list[str]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only --peers has."""
    group = harness.add_options(parser, "--only", PEERS, 3600.0)
    group.add_argument(
        "--corpora", default="prose+code", help=f"of {','.join(corpora.KINDS)}; + joins"
    )
    group.add_argument("--profiles", default="web", help=f"of {','.join(corpora.PROFILES)}")
    group.add_argument("--format", choices=corpora.FORMATS, default=corpora.FORMATS[0])


def run_peers(args: argparse.Namespace, texts_of: Callable[[Path], Iterator[str]]) -> int:
    """Measure and print; return the exit code.

    Args:
        args: the parsed options of `bench_tokenize.py`.
        texts_of: yields the texts of one file.
    """
    chosen = harness.chosen(args.only, PEERS, "--only")
    profiles = choose(args.profiles, list(corpora.PROFILES), "--profiles")
    for kinds in args.corpora.split(","):
        choose(kinds.replace("+", ","), list(corpora.KINDS), "--corpora")
    folder = args.corpus
    if folder is None:
        folder = SHARED_CORPORA if SHARED_CORPORA.is_dir() else corpora.PACKAGES
    print(f"text from {folder}; {args.workers} processes; {args.runs} runs; notes:")
    for peer in chosen:
        print(f"  {peer.name}: {peer.lacks}")
    pythons = {peer.name: ready(peer, args.peer_envs) for peer in chosen}
    good = True
    for kinds in args.corpora.split(","):
        text = corpora.text_of_kind(folder, kinds, texts_of, args.megabytes * 10**6)
        for profile in profiles:
            name = f"{kinds}, {profile}"
            if not text.strip():
                print(f"\n{name}: not measured, no such text under {folder}; give --corpus")
                continue
            with tempfile.TemporaryDirectory(prefix="olm-peers-") as work:
                formats = {format_for(peer, args.format) for peer in chosen}
                corpus = make_corpus(name, text, profile, args.megabytes, formats, Path(work))
                results = measure_corpus(corpus, chosen, pythons, args, Path(work))
                good &= print_table(corpus, results)
    return 0 if good else 1


def format_for(peer: Peer, wanted: str) -> str:
    """Return the input format a peer is given."""
    return wanted if wanted in peer.formats else peer.formats[0]


def make_corpus(
    name: str, text: str, profile: str, megabytes: int, formats: set[str], work: Path
) -> Corpus:
    """Cut documents and write them in each format."""
    mean = corpora.PROFILES[profile]
    documents = list(corpora.documents(text, mean, megabytes * 10**6))
    tiny = [document[:100] for document in documents[: corpora.PARTS]]
    files: tuple[dict[str, list[str]], dict[str, list[str]]] = ({}, {})
    for kind in sorted(formats):
        for texts, paths in zip((documents, tiny), files, strict=True):
            folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=work))
            paths[kind] = corpora.write_parts(texts, kind, folder)
    size = sum(len(document.encode()) for document in documents)
    return Corpus(name, size, len(documents), *files)


def measure_corpus(
    corpus: Corpus,
    chosen: list[Peer],
    pythons: dict[str, tuple[Path, str] | NotInstalled],
    args: argparse.Namespace,
    work: Path,
) -> list[Result]:
    """Run all peers in turn, --runs times."""
    from olm_data.tokenizer.tokenizer import load_tokenizer

    spec = load_tokenizer(args.tokenizer)
    if spec.eos is None or spec.eos_token is None:
        raise SystemExit("error: --peers needs a tokenizer with an end-of-document token")
    tokenizer = work / "tokenizer.json"
    tokenizer.write_bytes(spec.encoder_json(strip_special=False))
    borders = frozenset(token for token in (spec.eos, spec.bos) if token is not None)
    results = [Result(peer, input=format_for(peer, args.format)) for peer in chosen]
    for turn in range(args.runs + 1):
        for result in results:
            environment = pythons[result.peer.name]
            if isinstance(environment, NotInstalled):
                result.failure = f"not installed: {environment}"
            if result.failure or isinstance(environment, NotInstalled):
                continue
            python, result.version = environment
            place = Path(tempfile.mkdtemp(prefix="run-", dir=work))
            files = corpus.files if turn else corpus.tiny
            task = Task(
                inputs=files[result.input],
                tokenizer=str(tokenizer),
                output=str(place / "output"),
                scratch=str(place / "scratch"),
                workers=args.workers,
                eos=spec.eos,
                eos_text=spec.eos_token,
                vocab_size=spec.vocab_size,
            )
            what = f"run {turn}" if turn else "start"
            print(f"{corpus.name}: {what}, {result.peer.name}", file=sys.stderr, flush=True)
            usage = run_once(result, python, task, place, args.limit)
            if usage and not turn:
                result.start = usage.seconds
            elif usage:
                note(result, usage, task, borders)
            shutil.rmtree(place)
    return results


def run_once(
    result: Result, python: Path, task: Task, place: Path, limit: float
) -> measure.Usage | None:
    """Run a peer once; None where it failed, with the reason in `result`."""
    for folder in (task.output, task.scratch):
        Path(folder).mkdir()
    path = place / "task.json"
    task.save(path)
    granted = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(granted)[: task.workers])  # inherited by the peer
    try:
        usage = measure.run(
            result.peer.command(python, task, path),
            environment=surroundings(result.peer, Path(task.scratch)),
            folder=place,
            limit=limit,
        )
    finally:
        os.sched_setaffinity(0, granted)
    if usage.code:
        why = f"killed after {limit:.0f} s" if usage.seconds >= limit else last_line(usage.tail)
        result.failure = f"exit code {usage.code}: {why}"
        return None
    return usage


def note(result: Result, usage: measure.Usage, task: Task, borders: frozenset[int]) -> None:
    """Note a run's usage; of the first one also the sizes and the documents of its output."""
    output = Path(task.output)
    if not result.runs:
        result.output_bytes = measure.folder_bytes(output)
        result.scratch_bytes = measure.folder_bytes(Path(task.scratch))
        try:
            result.prints = compare.fingerprint(result.peer.read(output, task), borders)
        except (OSError, ValueError, KeyError) as error:
            result.failure = f"output cannot be read: {error}"
            return
    result.runs.append(usage)


def print_table(corpus: Corpus, results: list[Result]) -> bool:
    """Print one table; return whether every peer ran and agrees with ours."""
    print(f"\n{corpus.name}: {corpus.bytes / 1e6:.1f} MB of text, {corpus.documents:,} documents")
    print(COLUMNS.format(*HEADS))
    done = {r.peer.name: r for r in results if r.runs and not r.failure}
    ours = next((r for name, r in done.items() if name.startswith("olm-")), None)
    good = True
    for result in results:
        if result.peer.name not in done or result.prints is None:
            print(f"{result.peer.name:16}{result.version:>9}  FAILED: {result.failure}")
            good = False
            continue
        verdict = compare.Verdict(True, "not compared, ours did not run")
        if result is ours:
            verdict = compare.Verdict(True, "the reference")
        elif ours and ours.prints:
            verdict = compare.compare(ours.prints, result.prints)
        good &= verdict.equal
        ratios = [
            f"{result.seconds / done[name].seconds:.2f}" if name in done else "-"
            for name in ("olm-hf", "olm-gigatoken")
        ]
        print(
            COLUMNS.format(
                result.peer.name,
                result.version,
                result.input,
                f"{result.start:.2f}",
                f"{result.seconds:.2f}",
                f"{corpus.bytes / result.seconds / 1e6:.1f}",
                f"{result.prints.tokens / result.seconds / 1e6:.2f}",
                f"{max(run.memory for run in result.runs) / 1e6:.0f}",
                f"{max(run.rss for run in result.runs) / 1e6:.0f}",
                f"{result.output_bytes / 1e6:.1f}",
                f"{result.scratch_bytes / 1e6:.1f}",
                *ratios,
                verdict.text,
            )
        )
    sys.stdout.flush()
    return good
