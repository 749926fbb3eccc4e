"""Documents that are dropped as others have their text: exactly, nearly, or in evaluation texts."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.adding import Stop, add_to
from support.command import Olm
from support.inline_runner import InlineRunner
from support.project import Project
from support.tokenizing import digests, make_dataset, make_request, texts, tokenized, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.eval_set import Primary
from olm_data.errors import ConflictError, InputError, UsageError, ValidationError
from olm_data.extensions.eval_sets.tasks import Continuation, Question, Task, build
from olm_data.extensions.verify.datasets import verify
from olm_data.runners.local import LocalRunner
from olm_data.sources.base import DocumentBatch
from olm_data.sources.buffers import joined
from olm_data.tokenization import decontaminate
from olm_data.tokenization.decontaminate import EvalTexts, read_texts
from olm_data.tokenization.duplicates import fingerprints, later_copies
from olm_data.tokenization.near_duplicates import find_band_keys, parse_bands, shingles
from olm_data.tokenization.stored_job import load_job
from olm_data.tokenizer.tokenizer import load_tokenizer


def inputs(folder: Path) -> list[Path]:
    """Three files with copies within and across them: 90 different texts of 150."""
    return [
        write_jsonl(folder / "a.jsonl", [*texts(40), *texts(10)]),
        write_jsonl(folder / "b.jsonl", texts(50, 20)),
        write_jsonl(folder / "c.jsonl", [*texts(25, 65), *texts(25, 65)]),
    ]


class Recorded(InlineRunner):
    """Notes which pass ran which tasks, and stops after some of them."""

    def __init__(self, stop_after: int = 10**9) -> None:
        self.ran: list[tuple[str, int]] = []
        self.left = stop_after

    def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
        for task in tasks:
            if self.left == 0:
                raise Stop
            self.left -= 1
            super().run(job, [task], total, **callbacks)
            self.ran.append((type(job).__name__, task))


# --- which documents stay ----------------------------------------------------------------------
@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(st.lists(st.integers(0, 6), max_size=15), min_size=1, max_size=4),
    shard_tokens=st.sampled_from([10, 40, 1000]),
)
def test_the_result_is_that_of_a_plain_loop_over_all_documents(
    files: list[list[int]],
    shard_tokens: int,
    tiny_tokenizer: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("dedup")
    paths, first = [], {}
    for number, choice in enumerate([[0], *files]):
        path = write_jsonl(folder / f"{number}.jsonl", [texts(7)[k] for k in choice])
        paths.append(path)
        for line, k in enumerate(choice):
            first.setdefault(texts(7)[k], f"{number}-{line}")
    options: dict[str, Any] = {"dedup": "exact", "id_column": "id", "allow_duplicates": True}
    made = make_dataset(paths, tiny_tokenizer, folder / "out", shard_tokens=shard_tokens, **options)
    dataset = Dataset.open(str(folder / "out"))
    documents = list(dataset)
    assert [document.id for document in documents] == list(first.values())
    assert Project(folder, tiny_tokenizer).texts() == list(first)
    records = 1 + sum(map(len, files))
    assert made.manifest.dropped.get("duplicate", 0) == records - len(first)
    assert made.manifest.totals.documents_in == records


def test_duplicates_are_counted_by_input_and_both_splits_share_the_rule(project: Project) -> None:
    out, options = project.out, {"dedup": "exact", "holdout": "1/4", "shard_tokens": 400}
    made = project.make(inputs(project.folder), **options)
    assert made.manifest.dropped == {"duplicate": 60}
    counts = {path: account.dropped["duplicate"] for path, account in made.inputs.items()}
    assert counts == {"a.jsonl": 10, "b.jsonl": 20, "c.jsonl": 30}
    kept = project.texts(out) + project.texts(out / "validation")
    assert sorted(kept) == sorted(texts(90))
    assert made.manifest.tools.copies.duplicates == 0
    assert tokenized(made).dedup == "exact"
    assert not (out / "dedup").exists()
    assert verify(str(out)).ok


def test_kept_columns_and_ids_go_with_their_documents(project: Project) -> None:
    repeated = [text for text in texts(20) for _ in range(2)]
    pq.write_table(pa.table({"text": repeated, "n": range(40)}), project / "a.parquet")
    project.make([project / "a.parquet"], keep=("n",), dedup="exact")
    dataset = project.open()
    found = list(dataset)
    assert [item.columns["n"] for item in found] == list(range(0, 40, 2))
    assert [item.position for item in found] == list(range(0, 40, 2))


def test_without_duplicates_only_the_options_differ(project: Project) -> None:
    source = project.write("a.jsonl", texts(30))
    plain = project.make([source], "plain").manifest
    made = project.make([source], "dedup", dedup="exact").manifest
    assert "dedup" not in bytes(plain.stored_options).decode()
    assert plain.digest != made.digest
    assert plain.shards[0].sha256["tokens"] == made.shards[0].sha256["tokens"]


# --- interruptions and workers -----------------------------------------------------------------
@pytest.mark.parametrize("kind", ["exact", "minhash"])
def test_the_bytes_are_the_same_for_any_number_of_workers_and_any_interruption(
    kind: str, request: pytest.FixtureRequest, project: Project
) -> None:
    exact = kind == "exact"
    paths = inputs(project.folder) if exact else request.getfixturevalue("files")
    options: dict[str, Any] = {"dedup": kind, "shard_tokens": 400}
    whole = Recorded()
    project.make(paths, "whole", runner=whole, **options)
    tasks = len(whole.ran) // 2
    assert whole.ran == [
        (kind, t) for kind in ("FindDuplicates", "TokenizeJob") for t in range(tasks)
    ]
    expected = digests(project / "whole")
    project.make(paths, "two", runner=LocalRunner(2), **options)
    assert digests(project / "two") == expected
    for stop in (1, tasks, 2 * tasks - 1):
        out, first, second = project / f"stop-{stop}", Recorded(stop), Recorded()
        with pytest.raises(Stop):
            project.make(paths, out, runner=first, **options)
        project.make(paths, out, runner=second, **options)
        assert digests(out) == expected
        assert first.ran + second.ran == whole.ran  # no task is done twice


def test_a_damaged_file_of_the_first_pass_is_made_again(project: Project) -> None:
    paths, out = inputs(project.folder), project.out
    options: dict[str, Any] = {"dedup": "exact", "shard_tokens": 400}
    with pytest.raises(Stop):
        project.make(paths, out, runner=Recorded(2), **options)
    keys = sorted((out / "dedup").iterdir())
    keys[0].write_bytes(keys[0].read_bytes()[:-16])
    again = Recorded()
    project.make(paths, out, runner=again, **options)
    assert (again.ran[0], again.ran[1]) == (("FindDuplicates", 0), ("FindDuplicates", 2))
    assert sorted(project.texts(out)) == sorted(texts(90))


# --- additions ---------------------------------------------------------------------------------
def test_an_addition_is_compared_with_what_is_there(project: Project) -> None:
    first, second, third = inputs(project.folder)
    out, log = project.out, io.StringIO()
    project.make([first], dedup="exact", holdout="1/4", shard_tokens=400)
    project.add(second, log=log)
    assert "20 of 50 documents repeat an earlier one" in log.getvalue()
    made = project.add(third)
    kept = project.texts(out) + project.texts(out / "validation")
    assert sorted(kept) == sorted(texts(90))
    assert made.manifest.dropped == {"duplicate": 60}
    assert made.manifest.tools.copies.duplicates == 0
    assert not (out / "dedup").exists()
    assert verify(str(out)).ok


def test_an_addition_of_nothing_new_is_refused(project: Project) -> None:
    first, *_ = inputs(project.folder)
    project.make([first], dedup="exact")
    known = project.write("known.jsonl", texts(20))
    before = project.open().digest
    with pytest.raises(InputError, match="none of the 20 records"):
        project.add(known)
    assert project.open().digest == before


def test_the_command_drops_and_says_so(olm: Olm, here: Path, project: Project) -> None:
    inputs(here)
    words = ("a.jsonl", "b.jsonl", "--tokenizer", project.tokenizer, "--output", "out")
    ran = olm("tokenize", *words, "--workers", "1", "--dedup", "exact")
    assert ran.returncode == 0, ran.stderr
    assert "30 of 100 documents repeat an earlier one" in ran.stderr
    assert "  30 duplicate\n" in ran.stdout


def test_the_keys_of_a_task_are_stored_in_parts_of_any_number(
    monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    out = {}
    for part in (1 << 22, 7):
        monkeypatch.setattr("olm_data.tokenization.dedup.PART", part)
        project.make(inputs(project.folder), str(part), dedup="exact")
        out[part] = project.texts(str(part))
    assert out[7] == out[1 << 22] == texts(90)


Key = tuple[int, int]


FEW_HASHES = st.sampled_from([0, 1, 7, 1 << 31, 1 << 32, (1 << 63) + 5, (1 << 64) - 1])


DOCUMENT = st.tuples(FEW_HASHES, st.integers(1, 3))


PARTS = st.lists(st.lists(DOCUMENT, max_size=12), max_size=6)


def reference(parts: list[list[Key]]) -> list[tuple[int, int]]:
    """(number, bytes) of each document whose key came before, in plain Python."""
    seen: set[Key] = set()
    found = []
    for number, key in enumerate(key for part in parts for key in part):
        if key in seen:
            found.append((number, key[1]))
        seen.add(key)
    return found


def arrays(parts: list[list[Key]]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [
        (np.array([h for h, _ in part], np.uint64), np.array([n for _, n in part], np.int64))
        for part in parts
    ]


def copies(parts: list[list[Key]], most: int) -> list[tuple[int, int]]:
    documents = sum(map(len, parts))
    with tempfile.TemporaryDirectory() as scratch:
        found = [
            pair
            for numbers, sizes in later_copies(arrays(parts), documents, Path(scratch), most=most)
            for pair in zip(numbers.tolist(), sizes.tolist(), strict=True)
        ]
        assert not list(Path(scratch).iterdir())  # spooled files are gone
    return sorted(found)


@given(PARTS, st.integers(1, 80))
@example([[(5, 1), (5, 2), (5, 1)]], 2)
def test_all_but_the_first_of_each_kind_are_found_however_few_fit_in_memory(
    parts: list[list[Key]], most: int
) -> None:
    assert copies(parts, most) == reference(parts)


def test_documents_with_the_same_hash_and_other_sizes_are_no_duplicates() -> None:
    assert copies([[(9, 1), (9, 2), (9, 1), (9, 3)]], 100) == [(2, 1)]


def test_one_text_repeated_far_beyond_what_fits_is_carried_once() -> None:
    parts = [[(3, 5)] * 400, [(1 << 40, 2)] * 3, [(3, 5)] * 400]
    assert copies(parts, 10) == reference(parts)


@given(st.lists(st.lists(DOCUMENT, max_size=8), max_size=4), st.randoms())
def test_the_sum_of_fingerprints_names_the_texts_in_any_order_and_any_parts(
    parts: list[list[Key]], random: object
) -> None:
    def total(keys: list[Key]) -> tuple[int, ...]:
        (hashes, sizes), *_ = arrays([keys])
        return tuple(fingerprints(hashes, sizes).sum(axis=0).tolist())

    keys = [key for part in parts for key in part]
    shuffled = keys.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert total(shuffled) == total(keys)
    if keys:
        assert total(keys[1:]) != total(keys)
        assert total([*keys, keys[0]]) != total(keys)


RNG = np.random.default_rng(5)


WORDS = [f"word{n}" for n in range(5000)]


def keys(documents: list[str], bands: int, rows: int) -> np.ndarray:
    """The keys of each text, [d, bands]."""
    pytest.importorskip("rensa", reason="the extra dedup is not installed")
    data, offsets = joined([text.encode() for text in documents])
    places = np.arange(len(documents))
    batch = DocumentBatch(data, offsets, places.astype(np.int32), places)
    found = list(find_band_keys([batch], bands, rows, lambda **counts: None))
    assert (found[0][1].reshape(-1, bands) == np.arange(bands)).all()
    return found[0][0].reshape(-1, bands)


def edited(words: list[str], changes: int) -> list[str]:
    """A text with some words at its end replaced."""
    return [*words[: len(words) - changes], *RNG.choice(WORDS, changes)]


def test_pairs_meet_as_often_as_their_jaccard_similarity_says() -> None:
    for changes in (0, 5, 15, 30, 60):
        pairs = []
        for _ in range(150):
            words = RNG.choice(WORDS, 120).tolist()
            pairs.append((words, edited(words, changes)))
        similar = []
        for one, other in pairs:  # by sets of words, with no hash
            a, b = ({tuple(text[k : k + 5]) for k in range(116)} for text in (one, other))
            similar.append(len(a & b) / len(a | b))
        texts = [" ".join(words) for pair in pairs for words in pair]
        found = keys(texts, 14, 8)
        met = (found[::2] == found[1::2]).any(axis=1)
        expected = np.mean([1 - (1 - s**8) ** 14 for s in similar])
        assert abs(met.mean() - expected) < 0.12, (changes, met.mean(), expected)
        assert not (found[2::2] == found[:-2:2]).any()


def test_case_and_punctuation_are_no_difference_and_short_texts_are_told_apart() -> None:
    assert (
        shingles("The quick, brown FOX jumps over!") == shingles("the quick brown fox jumps over")
    ).all()
    short = ["", "a", "b", "a b", "b a", "!", "?", "a b c d e"]
    assert len({int(shingles(text)[0]) for text in short}) == len(short)


@pytest.mark.parametrize("text", ["14", "0x8", "9999x9", "14 x 8"])
def test_other_bands_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not BANDSxROWS"):
        parse_bands(text)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files, of whose 120 texts half are near copies of others."""
    pytest.importorskip("rensa", reason="the extra dedup is not installed")
    first = [RNG.choice(WORDS, 60).tolist() for _ in range(60)]
    texts = [*first, *(edited(words, k % 3) for k, words in enumerate(first))]
    RNG.shuffle(texts)
    lines = [" ".join(words) for words in texts]
    return [
        write_jsonl(tmp_path / "a.jsonl", lines[:50]),
        write_jsonl(tmp_path / "b.jsonl", lines[50:]),
    ]


def test_what_shares_a_key_with_an_earlier_text_is_dropped(
    files: list[Path], project: Project
) -> None:
    options: dict[str, Any] = {"dedup": "minhash", "shard_tokens": 400, "id_column": "id"}
    made = project.make(files, "whole", **options)
    assert len(made.manifest.shards) > 4
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    kept, seen = [], set[tuple[int, int]]()
    for row, found in zip(rows, keys([row["text"] for row in rows], 14, 8), strict=True):
        mine = set(enumerate(found.tolist()))
        if not mine & seen:
            kept.append(row["id"])
        seen |= mine
    assert 55 < len(kept) < 75
    dataset = project.open("whole")
    assert [dataset.document(n).id for n in range(dataset.documents)] == kept
    assert made.manifest.dropped == {"near_duplicate": len(rows) - len(kept)}
    assert tokenized(made).minhash == (14, 8)
    assert tokenized(made).libraries[0].startswith("rensa ")
    assert verify(str(project / "whole")).ok
    with pytest.raises(UsageError, match="nothing can be added"):
        add_to(project / "whole", files[0])
    # the list of what was dropped does the same again
    listed = project / "whole" / "near-duplicates"
    again = project.make(files, "again", id_column="id", exclude_ids=str(listed))
    assert again.manifest.dropped == {"excluded": len(rows) - len(kept)}
    assert again.manifest.totals == made.manifest.totals


QUESTION = "which of these planets is the closest to the sun and has no moon of its own"


SPOKEN = st.lists(st.sampled_from(["a", "b", "Cc"]), max_size=12)


@given(texts=st.lists(SPOKEN, max_size=4), document=SPOKEN, n=st.integers(2, 5))
@pytest.mark.parametrize("hashing", [True, False])
def test_a_document_is_found_where_n_words_in_a_row_are_the_same_and_only_there(
    texts: list[list[str]], document: list[str], n: int, hashing: bool
) -> None:
    """Against a comparison of all windows; without hashing every window is a collision."""
    with pytest.MonkeyPatch.context() as patch:
        if not hashing:
            patch.setattr(
                decontaminate,
                "window_hashes",
                lambda values, n: np.zeros(len(values) - n + 1, np.uint64),
            )
        found = EvalTexts.of((" ".join(text) for text in texts), n)

        def windows(text: list[str]) -> set[tuple[str, ...]]:
            lower = [word.lower() for word in text]
            return {tuple(lower[k : k + n]) for k in range(len(lower) - n + 1)}

        expected = any(windows(text) & windows(document) for text in texts)
        assert found.shares(", ".join(document).upper() + ".") == expected
        found.self_test()


def test_what_the_self_test_plants_must_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = EvalTexts.of(iter([QUESTION, "too short"]), 13)
    said = texts.self_test()
    assert said.endswith("1 planted in a self-test were found")
    assert "13 words in a row of 2 evaluation texts, 1 of them shorter" in said
    for wrong in (False, True):
        monkeypatch.setattr(EvalTexts, "shares", lambda *_, wrong=wrong: wrong)
        with pytest.raises(ValidationError, match="self-test of --decontaminate failed"):
            texts.self_test()


def test_documents_are_dropped_counted_and_listed_whoever_runs_the_tasks(project: Project) -> None:
    texts = [f"document {n} about nothing that anybody would ask for" for n in range(60)]
    for n in (3, 41):
        texts[n] += ": " + QUESTION.upper().replace(" ", ",\n") + "?"
    texts[50] += " ".join(QUESTION.split()[:12])  # one word less than it takes
    inputs = [project.write("a.jsonl", [*texts, texts[3]])]
    (project / "evals").mkdir()
    (project / "evals" / "quiz.jsonl").write_text(
        json.dumps({"id": 3, "question": QUESTION, "choices": [{"text": "Mercury"}]}) + "\n\n"
    )
    (project / "evals" / "short.txt").write_text("too short\nto be found\n")
    options: dict[str, Any] = {
        "decontaminate": [str(project / "evals")],
        "id_column": "id",
        "shard_tokens": 200,
        "dedup": "exact",
    }
    request = make_request(inputs, project.tokenizer, str(project / "none"), **options)
    assert request.evaluated.data.count(b"\n") == 2
    log = io.StringIO()
    made = project.make(inputs, "whole", log=log, **options)
    assert "1 of them shorter and so never found; 1 planted in a self-test" in log.getvalue()
    assert made.manifest.dropped == {"contaminated": 2, "duplicate": 1}
    kept = project.open("whole")
    assert [kept.document(n).id for n in range(kept.documents)] == [
        f"a-{n}" for n in range(60) if n not in (3, 41)
    ]
    listed = sorted((project / "whole" / "contaminated").iterdir())
    assert "".join(path.read_text() for path in listed) == "a-3\na-41\n"
    assert tokenized(made).decontaminate == (request.evaluated.sha256, 13)
    assert verify(str(project / "whole")).ok
    expected = digests(project / "whole")
    project.make(inputs, "two", runner=LocalRunner(2), **options)
    assert digests(project / "two") == expected
    # a run that was stopped goes on with the same texts alone
    out = project / "stopped"
    with pytest.raises(Stop):
        project.make(inputs, out, runner=Recorded(1), **options | {"dedup": None})
    (out / "evaluation-texts.txt").write_text(QUESTION)
    with pytest.raises(ValidationError, match="evaluation texts are missing or damaged"):
        _ = load_job(str(out)).evaluated
    for other in ({"decontaminate_ngram": 12}, {"decontaminate": [str(inputs[0])]}):
        with pytest.raises(ConflictError, match="decontaminate"):
            project.make(inputs, out, **options | {"dedup": None} | other)
    # what is added is compared with the texts of the dataset
    more = project.write("b.jsonl", ["a new one", f"another: {QUESTION}"])
    assert add_to(project / "two", more).manifest.dropped["contaminated"] == 3


def test_eval_sets_are_read_as_the_text_of_their_requests(project: Project) -> None:
    spec, folder = load_tokenizer(project.tokenizer), str(project / "set")
    choices = [Continuation(QUESTION, " mercury"), Continuation(QUESTION, " venus")]
    build(Task("quiz", Primary.acc, [Question(choices, 0)], "", "", ""), spec, folder)
    found = read_texts([folder], 13, spec)
    assert found.data.decode().splitlines() == [f"{QUESTION} mercury", f"{QUESTION} venus"]
    other = project / "other.json"
    other.write_text(project.tokenizer.read_text() + "\n")
    with pytest.raises(InputError, match="built with another tokenizer"):
        read_texts([folder], 13, load_tokenizer(other))


def test_conversations_are_compared_by_what_is_said(tmp_path: Path) -> None:
    said = json.dumps({"messages": [{"role": "user", "content": QUESTION.replace(" ", "\n")}]})
    texts = EvalTexts.of(iter([QUESTION]), 13)
    assert not texts.shares(said)
    assert texts.shares(" ".join(decontaminate._strings(json.loads(said))))


@pytest.mark.parametrize(
    ("name", "content", "error", "says"),
    [
        ("a.jsonl", b'{"a": "b"}\n{"a": \n', InputError, r"a.jsonl, line 2"),
        ("a.txt", b"\xff\xfe", InputError, "cannot be read"),
        ("a.txt", b"few words", InputError, "no evaluation text has 13 words"),
        ("a.csv", b"text\na", UsageError, "evaluation texts are text files"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    name: str, content: bytes, error: type[Exception], says: str, project: Project
) -> None:
    (project / name).write_bytes(content)
    with pytest.raises(error, match=says):
        read_texts([str(project / name)], 13, load_tokenizer(project.tokenizer))
