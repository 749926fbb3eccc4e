"""The pure parts of `bench_tokenize.py --peers`: corpora, the comparison of ids, output readers."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

TEXT = (
    "It was a bright cold day. Ž 生 and the clocks\n\n\twere striking thirteen; 👍 so they say. "
    * 40
)


@pytest.fixture(scope="module")
def peers(imported: Any) -> Any:
    """Importer of the modules under benchmarks/peers/token_writers."""
    return lambda name: imported(f"peers.token_writers.{name}")


def test_a_corpus_is_the_same_each_time_and_has_the_size_and_the_lengths_asked_for(
    peers: Any,
) -> None:
    corpora = peers("corpora")
    for mean in (50, 200, 3000):
        texts = list(corpora.documents(TEXT, mean, 30_000))
        assert texts == list(corpora.documents(TEXT, mean, 30_000))
        sizes = [len(t.encode()) for t in texts]
        assert 30_000 <= sum(sizes) < 30_000 + 1.5 * mean + 4
        assert 0.8 * mean < np.mean(sizes) < 1.2 * mean
        assert max(sizes) < 1.5 * mean + 4
        assert all(t and t == t.strip() for t in texts)


def test_the_first_pass_is_the_text_itself_and_later_passes_bring_new_words(peers: Any) -> None:
    corpora = peers("corpora")
    points = np.frombuffer(TEXT.encode("utf-32-le"), np.uint32)
    assert corpora.altered(points, 0) == TEXT
    later = [corpora.altered(points, turn) for turn in (1, 2)]
    assert later[0] != later[1]
    for text in later:
        assert sorted(text) == sorted(TEXT)
        assert set(text.split()) - set(TEXT.split())


def test_a_small_corpus_takes_the_same_share_of_every_file_of_the_kinds_asked_for(
    peers: Any, tmp_path: Path
) -> None:
    corpora = peers("corpora")
    for folder, letter in (("books", "b"), ("code-c", "c"), ("multilingual-x", "m"), ("web", "w")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part.txt").write_text(letter * 1000)
        (tmp_path / folder / "README").write_text("not a document")

    def text(kinds: str, enough: int) -> str:
        return str(corpora.text_of_kind(tmp_path, kinds, lambda p: iter([p.read_text()]), enough))

    assert text("prose", 200) == "b" * 100 + "\n" + "w" * 100
    assert text("prose+code", 10**6) == "\n".join(c * 1000 for c in "bcw")
    assert text("multilingual", 10) == "m" * 10


@given(st.text(max_size=50))
def test_utf8_reach_counts_bytes(peers: Any, text: str) -> None:
    reach = peers("corpora").utf8_reach(text)
    assert reach.tolist() == [len(text[:k].encode()) for k in range(len(text) + 1)]


def test_text_that_is_all_white_space_makes_no_corpus(peers: Any) -> None:
    with pytest.raises(ValueError, match="no text"):
        next(peers("corpora").documents(" \n", 200, 1000))


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.zst", "parquet"])
def test_part_files_hold_every_document_once(peers: Any, tmp_path: Path, kind: str) -> None:
    import pyarrow.parquet as pq

    texts = [f"document {k}" for k in range(21)]
    rows = []
    paths = peers("corpora").write_parts(texts, kind, tmp_path)
    assert len(paths) == 16
    for path in paths:
        if kind == "parquet":
            rows += pq.read_table(path).to_pylist()
        else:
            data = Path(path).read_bytes()
            data = zstandard.decompress(data) if kind == "jsonl.zst" else data
            rows += [json.loads(line) for line in data.splitlines()]
    assert {int(row["id"]): row["text"] for row in rows} == dict(enumerate(texts))


DOCUMENTS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=8)


def part(documents: list[list[int]], *, before: Any = (), after: Any = ()) -> Any:
    """One part of a peer's output, with ids put before and after each document."""
    whole = [[*before, *document, *after] for document in documents]
    ids = np.array([i for document in whole for i in document], np.uint16)
    return ids, np.cumsum([len(document) for document in whole], dtype=np.int64)


@given(DOCUMENTS, st.randoms())
@settings(max_examples=50)
def test_bos_eos_parts_and_order_make_no_difference(
    peers: Any, documents: list[list[int]], random: Any
) -> None:
    compare = peers("compare")
    borders = frozenset({0, 77})
    ours = compare.fingerprint([part(documents, after=[0])], borders)
    assert ours.tokens == sum(map(len, documents))
    theirs = compare.fingerprint([part([d], before=[77]) for d in documents], borders)
    assert compare.compare(ours, theirs) == compare.Verdict(True, "equal, same order")
    shuffled = random.sample(documents, len(documents))
    other = compare.fingerprint([part(shuffled)], borders)
    assert compare.compare(ours, other).equal


@given(DOCUMENTS, st.data())
@settings(max_examples=50)
def test_one_wrong_id_a_lost_a_doubled_or_a_cut_document_is_found(
    peers: Any, documents: list[list[int]], data: Any
) -> None:
    compare = peers("compare")
    ours = compare.fingerprint([part(documents)], frozenset({0}))
    k = data.draw(st.integers(0, len(documents) - 1))
    wrong = [list(d) for d in documents]
    wrong[k][data.draw(st.integers(0, len(wrong[k]) - 1))] += 10
    joined = [*documents[:k], *documents[k + 1 :], documents[k] * 2]
    for bad in (wrong, documents[:k] + documents[k + 1 :], [*documents, documents[k]], joined):
        verdict = compare.compare(ours, compare.fingerprint([part(bad)], frozenset({0})))
        assert not verdict.equal
        assert verdict.text.startswith("DIFFER")


def test_ends_that_do_not_cover_the_ids_are_refused(peers: Any) -> None:
    ids, ends = part([[1, 2], [3]])
    for bad in (ends[:-1], ends + 1, ends[::-1]):
        with pytest.raises(ValueError, match="do not cover"):
            peers("compare").fingerprint([(ids, bad)], frozenset())


def test_a_stream_without_ends_is_cut_after_each_eos(peers: Any) -> None:
    ids = np.array([5, 6, 0, 7, 0, 8], np.uint16)
    assert peers("base").cut_at_eos(ids, 0)[1].tolist() == [3, 5, 6]
    assert peers("base").cut_at_eos(ids[:0], 0)[1].tolist() == []


def test_memory_is_that_of_the_whole_process_tree(peers: Any) -> None:
    child = "b = bytearray(64 << 20); print('filled', flush=True); input()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"filled\n"
        sampler = peers("measure").TreeSampler(process.pid)
        sampler.sample()
        process.communicate(b"\n")
    assert 64 << 20 < sampler.memory < 256 << 20
    assert 64 << 20 < sampler.rss < 256 << 20


def test_a_command_is_timed_with_its_exit_code_and_killed_past_the_limit(
    peers: Any, tmp_path: Path
) -> None:
    run = peers("measure").run
    failing = [sys.executable, "-c", "print('oh no'); raise SystemExit(3)"]
    usage = run(failing, environment={}, folder=tmp_path, limit=60)
    assert (usage.code, usage.tail) == (3, "oh no\n")
    waiting = [sys.executable, "-c", "import signal; signal.pause()"]
    assert run(waiting, environment={}, folder=tmp_path, limit=0.2).code < 0


def test_a_peer_without_its_package_says_why(peers: Any) -> None:
    environments, base = importlib.import_module("peers.environments"), peers("base")
    peer = base.Peer(
        name="broken",
        package="no-such-package-here",
        formats=("jsonl",),
        command=base.module_command("none"),
        read=lambda output, task: iter(()),
        lacks="everything",
    )
    with pytest.raises(environments.NotInstalled, match="no-such-package-here is not in this"):
        environments.version_of(peer, Path(sys.executable))
    assert environments.last_line("fine\nValueError: no\nbye") == "ValueError: no"


def test_the_megatron_method_writes_the_ids_of_every_document_and_an_index_of_them(
    peers: Any, repository: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    texts = [TEXT[k : k + 50].strip() for k in range(0, 1000, 50)]
    task = peers("base").Task(
        inputs=peers("corpora").write_parts(texts, "jsonl", tmp_path),
        tokenizer=str(tiny_tokenizer),
        output=str(tmp_path),
        scratch=str(tmp_path),
        workers=1,
        eos=0,
        eos_text="<|endoftext|>",
        vocab_size=512,
    )
    task.save(tmp_path / "task.json")
    subprocess.run(
        [sys.executable, "-m", "peers.token_writers.megatron", str(tmp_path / "task.json")],
        env={"PYTHONPATH": str(repository / "benchmarks")},
        check=True,
    )
    ((ids, ends),) = peers("megatron").read(tmp_path, task)
    assert (tmp_path / "text.idx").stat().st_size == 42 + 20 * len(texts)
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer))
    written = [part.tolist() for part in np.split(ids, ends[:-1])]
    assert sorted(written) == sorted([*tokenizer.encode(text).ids, 0] for text in texts)


def test_characters_of_a_byte_level_vocabulary_stand_for_the_bytes_that_tokenizers_takes(
    peers: Any,
) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    byte_of = peers("bpe").byte_of_character()
    assert set(byte_of) == set(ByteLevel.alphabet())
    encode = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    ((shown, _),) = encode(TEXT)
    assert bytes(byte_of[c] for c in shown) == TEXT.encode()


def test_ours_is_read_back_document_by_document(peers: Any, tmp_path: Path) -> None:
    from support.small_datasets import write_dataset

    shards = [[[3, 4, 0], [5, 0]], [[6, 7, 8, 0]]]
    write_dataset(tmp_path / "dataset", shards)
    parts = [
        [document.tolist() for document in np.split(ids, ends[:-1])]
        for ids, ends in peers("olm").read(tmp_path / "dataset", None)
    ]
    assert parts == shards


def test_a_run_prints_a_table_and_what_it_did_not_measure(
    repository: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    done = subprocess.run(
        [
            *(sys.executable, "benchmarks/bench_tokenize.py", "--peers", "--megabytes", "1"),
            *("--tokenizer", str(tiny_tokenizer), "--corpus", str(tmp_path), "--runs", "1"),
            *("--corpora", "prose,multilingual", "--workers", "1", "--only", "bare-gigatoken"),
        ],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prose, web: 1.0 MB of text" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("bare-gigatoken "))
    assert "FAILED" not in row
    assert row.endswith("not compared, ours did not run")
    assert "multilingual, web: not measured" in done.stdout
