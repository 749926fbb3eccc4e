"""Tokenising: every document in, in order, once; the account of all others; reruns and refusals."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections import namedtuple
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizing import digests, make_dataset, make_request, texts, write_jsonl

from olm_data.counts import parse_share
from olm_data.dataset.dataset import Dataset
from olm_data.errors import ConflictError, InputError, ResourceError, UsageError, ValidationError
from olm_data.runners.base import Count, whole
from olm_data.runners.local import InlineRunner, LocalRunner
from olm_data.select.digests import content_hashes, document_digests
from olm_data.tokenization import pipeline
from olm_data.tokenization.accounts import runs
from olm_data.tokenization.pipeline import delimit
from olm_data.tokenization.recipe import parse_budget
from olm_data.tokenization.report import duplicate_lines, summary_json
from olm_data.tokenizer.tokenizer import load_tokenizer


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """Three JSONL files of 40 documents each."""
    return [write_jsonl(tmp_path / f"{k}.jsonl", texts(40, 40 * k)) for k in range(3)]


def decoded(dataset: Dataset, tokenizer: Path) -> list[str]:
    spec = load_tokenizer(tokenizer)
    return [spec.decode(dataset.document(n).tokens[:-1]) for n in range(dataset.documents)]


# --- what is written ---------------------------------------------------------------------------


def test_every_document_is_there_once_in_input_order_across_shards(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    made = make_dataset(inputs, tiny_tokenizer, tmp_path / "out", shard_tokens=300)
    dataset = Dataset.open(str(tmp_path / "out"), verify="full")
    assert len(made.manifest.shards) > 5
    assert decoded(dataset, tiny_tokenizer) == texts(120)


def test_ids_are_the_references_with_eos_after_each_document(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    make_dataset(inputs[:1], tiny_tokenizer, tmp_path / "out")
    dataset, spec = Dataset.open(str(tmp_path / "out")), load_tokenizer(tiny_tokenizer)
    for number, text in enumerate(texts(40)):
        assert dataset.document(number).tokens.tolist() == [*spec.encode(text), spec.eos]


def test_bos_and_no_eos_are_as_asked(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    text = texts(1)[0]
    for eos, bos in (("none", "<|endoftext|>"), ("none", "none"), ("auto", "<|endoftext|>")):
        out = tmp_path / f"{eos}-{bos[:1]}"
        made = make_dataset(inputs[:1], tiny_tokenizer, out, eos=eos, bos=bos)
        expected = [spec.eos] * (bos != "none") + spec.encode(text) + [spec.eos] * (eos == "auto")
        assert Dataset.open(str(out)).document(0).tokens.tolist() == expected
        assert made.manifest.tokenizer.eos == (None if eos == "none" else spec.eos)


def test_provenance_leads_back_to_the_line_in_the_file(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    make_dataset(inputs, tiny_tokenizer, tmp_path / "out", shard_tokens=300, id_column="id")
    dataset = Dataset.open(str(tmp_path / "out"))
    for number in (0, 41, 119):
        document = dataset.document(number)
        assert document.position_kind == "byte"
        with open(tmp_path / document.input, "rb") as file:
            file.seek(document.position)
            record = json.loads(file.readline())
        assert record["text"] == texts(120)[number]
        assert record["id"] == document.id
        assert document.text_bytes == len(record["text"].encode())


def test_content_hashes_are_of_the_text(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    make_dataset(inputs[:1], tiny_tokenizer, tmp_path / "out")
    rows = pq.read_table(tmp_path / "out" / "shard-00000.docs.parquet")
    expected = [
        int.from_bytes(xxhash.xxh3_128_digest(text.encode())[:8], "little") for text in texts(40)
    ]
    assert rows["content_hash"].to_pylist() == expected


def test_kept_columns_stand_beside_each_document(tiny_tokenizer: Path, tmp_path: Path) -> None:
    table = pa.table({"text": texts(10), "url": [f"u{n}" for n in range(10)], "score": range(10)})
    pq.write_table(table, tmp_path / "a.parquet")
    make_dataset([tmp_path / "a.parquet"], tiny_tokenizer, tmp_path / "out", keep=("url", "score"))
    document = Dataset.open(str(tmp_path / "out")).document(7)
    assert document.columns == {"url": "u7", "score": 7}
    assert (document.position_kind, document.position) == ("row", 7)


def test_a_vocabulary_above_65536_is_stored_as_uint32(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{n}": n + 1 for n in range(70_000)} | {"<|endoftext|>": 0}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_jsonl(tmp_path / "a.jsonl", ["w1 w69999 w65535 w65536"])
    made = make_dataset([tmp_path / "a.jsonl"], tmp_path / "tokenizer.json", tmp_path / "out")
    assert made.manifest.dtype == "uint32"
    stored = np.load(tmp_path / "out" / "shard-00000.tokens.npy", mmap_mode="r")
    assert stored.tolist() == [2, 70_000, 65_536, 65_537, 0]


def test_text_that_spells_a_special_token_is_plain_counted_allowed_or_refused(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["one <|endoftext|> two <|endoftext|>"])
    spec = load_tokenizer(tiny_tokenizer)
    made = make_dataset([source], tiny_tokenizer, tmp_path / "plain")
    assert made.special_hits == 2
    plain = Dataset.open(str(tmp_path / "plain")).document(0).tokens.tolist()
    assert plain.count(spec.eos) == 1
    make_dataset([source], tiny_tokenizer, tmp_path / "allow", special="allow")
    allowed = Dataset.open(str(tmp_path / "allow")).document(0).tokens.tolist()
    assert allowed.count(spec.eos) == 3
    with pytest.raises(InputError, match="endoftext") as caught:
        make_dataset([source], tiny_tokenizer, tmp_path / "error", special="error")
    assert "a.jsonl" in str(caught.value.where)


# --- the account of what was dropped -----------------------------------------------------------


def test_every_record_is_a_document_or_a_counted_drop(tiny_tokenizer: Path, tmp_path: Path) -> None:
    lines: list[Any] = [*texts(20), "", " \n\t ", b"{broken", b'{"id": 1}', b'{"text": "\xff\xfe"}']
    source = write_jsonl(tmp_path / "a.jsonl", lines)
    made = make_dataset([source], tiny_tokenizer, tmp_path / "out", max_bad="3")
    assert made.manifest.dropped == {
        "empty": 2,
        "invalid_utf8": 1,
        "malformed": 1,
        "no_text": 1,
    }
    assert made.manifest.totals.documents == 20
    assert made.manifest.totals.documents_in == 25
    assert made.manifest.inputs[0].documents == 25


def test_too_many_bad_records_stop_the_manifest_but_keep_the_shards(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    good = write_jsonl(tmp_path / "a.jsonl", texts(30))
    bad = write_jsonl(tmp_path / "b.jsonl", [*texts(5), *[b"{broken"] * 12])
    out = tmp_path / "out"
    with pytest.raises(InputError, match="12 of 47 records") as caught:
        make_dataset([good, bad], tiny_tokenizer, out, shard_tokens=200)
    message = str(caught.value)
    assert message.count("b.jsonl: byte") == 10
    assert "--max-bad 12" in message
    assert not (out / "manifest.json").exists()
    log = io.StringIO()
    made = make_dataset([good, bad], tiny_tokenizer, out, shard_tokens=200, max_bad="12", log=log)
    assert made.documents_now == 0
    assert made.manifest.totals.documents == 35
    assert "finished before" in log.getvalue()


def test_empty_documents_do_not_count_as_bad(tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*texts(3), *[""] * 10])
    made = make_dataset([source], tiny_tokenizer, tmp_path / "out", max_bad="0")
    assert made.manifest.dropped == {"empty": 10}


def test_an_input_without_documents_is_refused(tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["", " "])
    with pytest.raises(InputError, match="training document"):
        make_dataset([source], tiny_tokenizer, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


# --- holdout -----------------------------------------------------------------------------------


def test_the_validation_split_is_chosen_by_content_and_overlaps_nothing(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    made = make_dataset(inputs, tiny_tokenizer, tmp_path / "out", shard_tokens=300, holdout="1/4")
    train = decoded(Dataset.open(str(tmp_path / "out")), tiny_tokenizer)
    held = decoded(Dataset.open(str(tmp_path / "out" / "validation")), tiny_tokenizer)
    assert made.validation is not None
    assert sorted(train + held) == sorted(texts(120))
    assert held == [
        text
        for text in texts(120)
        if int.from_bytes(xxhash.xxh3_128_digest(text.encode())[:8], "little") < 2**62
    ]
    assert 10 < len(held) < 60
    totals = made.manifest.totals
    assert totals.other_split == len(held)
    assert made.validation.plan == made.manifest.plan


def test_a_larger_input_never_moves_a_document_between_splits(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    make_dataset(inputs[:1], tiny_tokenizer, tmp_path / "small", holdout="1/4")
    make_dataset(inputs, tiny_tokenizer, tmp_path / "large", holdout="1/4")
    small = decoded(Dataset.open(str(tmp_path / "small" / "validation")), tiny_tokenizer)
    large = decoded(Dataset.open(str(tmp_path / "large" / "validation")), tiny_tokenizer)
    assert set(small) == set(large) & set(texts(40))


def test_an_empty_validation_split_is_a_dataset_of_no_documents(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    made = make_dataset(inputs[:1], tiny_tokenizer, tmp_path / "out", holdout="1/1000000000")
    assert made.validation is not None
    assert made.validation.totals.documents == 0
    assert Dataset.open(str(tmp_path / "out" / "validation")).tokens == 0


# --- reruns ------------------------------------------------------------------------------------


def test_any_number_of_workers_writes_the_same_bytes(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    seen = []
    for number, runner in enumerate((InlineRunner(), LocalRunner(1), LocalRunner(3))):
        out = tmp_path / str(number)
        make_dataset(inputs, tiny_tokenizer, out, shard_tokens=300, holdout="1/8", runner=runner)
        seen.append(digests(out))
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) > 20


def test_each_stage_says_how_long_it_was_at_work(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    class Watched(InlineRunner):
        counts = np.zeros(0)

        def run(self, *args: Any, watch: Any, **rest: Any) -> None:
            def both(counts: np.ndarray, running: Any) -> None:
                self.counts = counts
                watch(counts, running)

            super().run(*args, watch=both, **rest)

    runner = Watched()
    make_dataset(inputs, tiny_tokenizer, tmp_path / "out", shard_tokens=300, runner=runner)
    assert (runner.counts[:, [Count.READ_US, Count.ENCODE_US, Count.WRITE_US]] > 0).all()


def test_a_rerun_of_a_complete_dataset_does_nothing(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = make_dataset(inputs, tiny_tokenizer, out, holdout="1/8")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    again = make_dataset(inputs, tiny_tokenizer, out, holdout="1/8")
    assert again.already_complete
    assert again.manifest == first.manifest
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "lost",
    [
        ["manifest.json"],
        ["manifest.json", "shard-00001.json"],
        ["manifest.json", "validation/manifest.json", "validation/shard-00000.json"],
        ["manifest.json", "shard-00001.tokens.npy"],
    ],
)
def test_a_rerun_makes_good_what_is_missing_and_keeps_the_rest(
    lost: list[str], inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    make_dataset(inputs, tiny_tokenizer, out, shard_tokens=300, holdout="1/8")
    whole = digests(out)
    for name in lost:
        (out / name).unlink()
    again = make_dataset(inputs, tiny_tokenizer, out, shard_tokens=300, holdout="1/8")
    assert digests(out) == whole
    assert again.kept_shards == len(again.manifest.shards) - (len(lost) > 1)


@pytest.mark.parametrize("damage", [b"", b"{", b"{}", b"\xff"])
def test_a_damaged_commit_record_means_the_task_is_done_again(
    damage: bytes, inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    make_dataset(inputs, tiny_tokenizer, out, shard_tokens=300)
    whole = digests(out)
    (out / "manifest.json").unlink()
    (out / "shard-00002.json").write_bytes(damage)
    make_dataset(inputs, tiny_tokenizer, out, shard_tokens=300)
    assert digests(out) == whole


def test_other_options_or_inputs_on_the_same_output_are_refused_and_named(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    make_dataset(inputs, tiny_tokenizer, out)
    with pytest.raises(ConflictError, match="another dataset") as caught:
        make_dataset(inputs, tiny_tokenizer, out, holdout="1/8", eos="none")
    assert "holdout: '0' there, '1/8' now" in str(caught.value)
    assert "eos: " in str(caught.value)
    with pytest.raises(ConflictError) as caught:
        make_dataset(inputs[:2], tiny_tokenizer, out)
    assert "input 2.jsonl: gone" in str(caught.value)
    assert "--output" in str(caught.value.fix)


def test_a_damaged_plan_is_refused_not_overwritten(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    make_dataset(inputs, tiny_tokenizer, out)
    (out / "plan.json").write_bytes(b"{")
    with pytest.raises(ValidationError, match="plan"):
        make_dataset(inputs, tiny_tokenizer, out)


def test_a_disk_that_is_plainly_too_small_is_refused_before_work(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 3))
    with pytest.raises(ResourceError, match=r"3 free"):
        make_dataset(inputs, tiny_tokenizer, tmp_path / "out")
    assert not list((tmp_path / "out").glob("shard-*"))


def test_no_staging_folder_and_no_lock_is_left(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    make_dataset(inputs, tiny_tokenizer, tmp_path / "out", holdout="1/8")
    assert not list((tmp_path / "out").rglob(".*"))


def test_the_plan_is_written_before_any_shard(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    class Stop(InlineRunner):
        def run(self, job: Any, tasks: Any, total: int, **_: Any) -> None:
            assert (tmp_path / "out" / "plan.json").exists()
            assert not list((tmp_path / "out").glob("shard-*"))
            raise InputError("stopped")

    with pytest.raises(InputError, match="stopped"):
        make_dataset(inputs, tiny_tokenizer, tmp_path / "out", runner=Stop())


# --- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bad", "records", "allowed"),
    [
        ("0.1%", 1, 1000, True),
        ("0.1%", 2, 1000, False),
        ("0", 0, 5, True),
        ("0", 1, 5, False),
        ("25", 25, 30, True),
        ("100%", 30, 30, True),
    ],
)
def test_the_budget_is_a_share_or_a_count(text: str, bad: int, records: int, allowed: bool) -> None:
    assert parse_budget(text).allows(bad, records) is allowed


@pytest.mark.parametrize("text", ["-1", "1.5", "x", "", "%", "101%", "-1%", "nan", "1e400%"])
def test_an_odd_budget_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_budget(text)


def test_shares_are_exact() -> None:
    assert parse_share("0.001", "--holdout") == Fraction(1, 1000)
    assert parse_share("1/3", "--holdout") == Fraction(1, 3)
    assert parse_share("0.1%", "--holdout") == Fraction(1, 1000)
    for odd in ("1", "-0.1", "2", "x", "1/0", "nan", "inf"):
        with pytest.raises(UsageError):
            parse_share(odd, "--holdout")


DOCUMENTS = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=12)


@given(DOCUMENTS, st.data(), st.sampled_from([None, 90]), st.sampled_from([None, 91]))
def test_delimiting_equals_the_plain_loop(
    documents: list[list[int]], data: st.DataObject, bos: int | None, eos: int | None
) -> None:
    chosen = np.array([data.draw(st.booleans()) for _ in documents], bool)
    ids = np.array([i for document in documents for i in document], np.uint32)
    offsets = np.cumsum([0, *map(len, documents)])
    expected = [
        [bos] * (bos is not None) + document + [eos] * (eos is not None)
        for document, keep in zip(documents, chosen, strict=True)
        if keep
    ]
    for long in (-1, pipeline.LONG_TOKENS):  # documents count as long, and do not
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "LONG_TOKENS", long)
            got, ends = delimit(ids, offsets, chosen, bos=bos, eos=eos)
        assert got.tolist() == [i for document in expected for i in document]
        assert ends.tolist() == np.cumsum([0, *map(len, expected)]).tolist()


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=10))
def test_digests_and_hashes_are_those_of_each_document(documents: list[bytes]) -> None:
    data = np.frombuffer(b"".join(documents), np.uint8)
    raw = document_digests(data, np.cumsum([0, *map(len, documents)]))
    assert raw == b"".join(xxhash.xxh3_128_digest(document) for document in documents)
    assert content_hashes(raw).tolist() == [
        int.from_bytes(xxhash.xxh3_128_digest(document)[:8], "little") for document in documents
    ]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_runs_are_the_stretches_of_equal_values(values: list[int]) -> None:
    found = runs(np.array(values))
    assert [i for first, last in found for i in range(first, last)] == list(range(len(values)))
    for first, last in found:
        assert len(set(values[first:last])) == 1
        assert last == len(values) or values[last] != values[first]


def test_inputs_of_the_plan_do_not_depend_on_where_they_lie(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    plans = []
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        files = [write_jsonl(tmp_path / folder / f"{k}.jsonl", texts(9)) for k in range(2)]
        plans.append(make_request(files, tiny_tokenizer).plan().digest)
    assert plans[0] == plans[1]


def test_a_file_name_that_is_no_unicode_is_refused(tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(3))
    odd = source.rename(tmp_path / os.fsdecode(b"\xff.jsonl"))
    with pytest.raises(InputError, match="UTF-8") as caught:
        make_dataset([odd], tiny_tokenizer, tmp_path / "out")
    assert str(caught.value).isascii()


def test_the_job_runs_in_a_fresh_process_from_its_pickle_alone(
    inputs: list[Path], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    import pickle

    class Spy(InlineRunner):
        def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
            whole(job.run(0, lambda **_: None))  # makes the encoder, which must not travel
            super().run(pickle.loads(pickle.dumps(job)), tasks, total, **callbacks)

    made = make_dataset(inputs[:1], tiny_tokenizer, tmp_path / "out", runner=Spy())
    assert made.manifest.totals.documents == 40


# --- duplicates --------------------------------------------------------------------------------


def test_duplicates_are_counted_over_both_splits_and_kept_in_the_manifest(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", texts(100))
    again = write_jsonl(tmp_path / "b.jsonl", [*texts(30, 90), texts(1)[0]])
    out = tmp_path / "out"
    made = make_dataset([first, again], tiny_tokenizer, out, shard_tokens=700, holdout="1/5")
    copies = [*texts(10, 90), texts(1)[0]]
    for manifest in (made.manifest, made.validation):
        assert manifest is not None
        counted = manifest.tools.copies
        assert counted is not None
        assert counted.duplicates == 11
        assert counted.duplicate_bytes == sum(len(t.encode()) for t in copies)
    assert summary_json(made)["duplicates"] == 11
    (line,) = duplicate_lines(made.manifest, made.validation)
    assert line.startswith("  duplicates  11 of 131 documents (8.4%)")


def test_the_fingerprint_names_the_texts_whatever_the_files_order_shards_or_split(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", texts(70))
    b = write_jsonl(tmp_path / "b.jsonl", texts(50, 70))
    both = write_jsonl(tmp_path / "c.jsonl", reversed(texts(120)))
    one = make_dataset([a, b], tiny_tokenizer, tmp_path / "one", shard_tokens=500)
    other = make_dataset([both], tiny_tokenizer, tmp_path / "other", holdout="1/3")
    fewer = make_dataset([a], tiny_tokenizer, tmp_path / "fewer")
    assert summary_json(one)["content"] == summary_json(other)["content"]
    assert summary_json(one)["content"] != summary_json(fewer)["content"]
