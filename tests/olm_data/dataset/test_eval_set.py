"""What lies beside the shards: tokenizers of datasets, and eval sets."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.project import Project
from support.tokenizing import texts

from olm_data.dataset.eval_set import MANIFEST, REQUESTS, TOKENS, EvalSet, Primary
from olm_data.dataset.tokenizer import (
    TOKENIZER,
    TokenizerInfo,
    TokenizerRules,
    own_tokenizer,
    prompt_tokenizer,
    read_own,
)
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.extensions.eval_sets.tasks import Continuation, Question, Task, build, read_jsonl
from olm_data.storage.store import Store
from olm_data.tokenizer.tokenizer import load_tokenizer, spec_from_bytes

LINES = [
    {"context": "The quick brown", "choices": [" fox", " dog", " owl jumps"], "gold": 0},
    {"context": ["over the lazy ", "over a"], "choices": ["dog", " fox"], "gold": 1},
    {"context": "", "choices": ["seven owls sleep"]},
]


def write(path: Path, lines: list[object] = LINES) -> Path:  # type: ignore[assignment]  # never changed
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_task_is_the_same_when_it_is_opened_again(tmp_path: Path, tiny_tokenizer: Path) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    made = build(read_jsonl(write(tmp_path / "mine.jsonl")), spec, str(tmp_path / "set"))
    again = EvalSet.open(str(tmp_path / "set"))
    assert again.info == made.info
    assert (again.info.questions, again.info.requests) == (3, 6)
    assert again.info.primary == "len_norm"
    assert again.info.tokenizer == TokenizerRules(
        spec.sha256, spec.probe_sha256, spec.vocab_size, spec.bos, spec.eos
    )
    requests = again.requests
    assert requests.question.tolist() == [0, 0, 0, 1, 1, 2]
    assert np.flatnonzero(requests.gold).tolist() == [0, 4, 5]
    assert requests.chars.tolist() == [4, 4, 10, 3, 4, 16]
    texts = [
        spec.decode(requests.tokens[a:b])
        for a, b in zip(requests.starts, requests.ends, strict=True)
    ]
    assert texts[:5] == [
        "The quick brown fox",
        "The quick brown dog",
        "The quick brown owl jumps",
        "over the lazy dog",
        "over a fox",
    ]
    assert texts[5] == "<|endoftext|>seven owls sleep", "where there is no context, EOS stands"
    assert requests.context[5] == 1
    before = spec.decode(requests.tokens[requests.starts[3] :][: requests.context[3]])
    assert before == "over the lazy", "spaces at the end of a context go to the continuation"


def test_building_again_changes_nothing_and_another_task_is_refused(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    spec, task = load_tokenizer(tiny_tokenizer), read_jsonl(write(tmp_path / "mine.jsonl"))
    first = build(task, spec, str(tmp_path / "set"))
    assert build(task, spec, str(tmp_path / "set")).info == first.info
    with pytest.raises(UsageError, match="there is another eval set"):
        build(task, spec, str(tmp_path / "set"), primary=Primary.acc)


@pytest.mark.parametrize("name", [MANIFEST, TOKENS, REQUESTS])
def test_a_changed_file_is_refused(tmp_path: Path, tiny_tokenizer: Path, name: str) -> None:
    task = read_jsonl(write(tmp_path / "mine.jsonl"))
    build(task, load_tokenizer(tiny_tokenizer), str(tmp_path / "set"))
    data = bytearray((tmp_path / "set" / name).read_bytes())
    place = data.index(b"len_norm") if name == MANIFEST else 5
    data[place : place + 8] = b"acc     " if name == MANIFEST else b"\x01" * 8
    if name == MANIFEST:
        data = bytearray(bytes(data).replace(b"acc     ", b"acc"))
    (tmp_path / "set" / name).write_bytes(bytes(data))
    with pytest.raises(ValidationError, match="the eval set is damaged"):
        EvalSet.open(str(tmp_path / "set"))
    (tmp_path / "set" / name).unlink()
    with pytest.raises((ValidationError, InputError)):
        EvalSet.open(str(tmp_path / "set"))


def test_acc_uncond_needs_a_context_that_asks_nothing(tmp_path: Path, tiny_tokenizer: Path) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    plain = [Continuation("The quick", " fox"), Continuation("The quick", " dog")]
    task = Task("mine", Primary.acc, [Question(plain, 0)], "mine", "", "mine")
    with pytest.raises(UsageError, match="needs an unconditional context"):
        build(task, spec, str(tmp_path / "a"), primary=Primary.acc_uncond)
    lines = [{**LINES[0], "unconditional_context": "Answer:"}]
    made = build(read_jsonl(write(tmp_path / "b.jsonl", lines)), spec, str(tmp_path / "b"))
    assert (made.info.primary, made.requests.unconditional.sum()) == ("acc_uncond", 3)


@pytest.fixture
def stored(tiny_tokenizer: Path, tmp_path: Path) -> tuple[Store, TokenizerInfo]:
    spec = load_tokenizer(tiny_tokenizer)
    (tmp_path / TOKENIZER).write_bytes(spec.json_bytes)
    return Store(tmp_path), TokenizerInfo.of(spec, "plain")


def test_it_has_the_rules_of_the_dataset(
    stored: tuple[Store, TokenizerInfo], tiny_tokenizer: Path
) -> None:
    store, info = stored
    spec, loaded = own_tokenizer(store, info, "tiny"), load_tokenizer(tiny_tokenizer)
    assert (spec.eos, spec.eos_token, spec.bos) == (loaded.eos, loaded.eos_token, None)
    assert TokenizerInfo.of(spec, "plain") == info
    assert spec.special_tokens == loaded.special_tokens
    assert spec.decode(spec.encode("one two")) == "one two"


def test_an_ordinary_token_that_ends_documents_is_special(
    stored: tuple[Store, TokenizerInfo],
) -> None:
    spec = spec_from_bytes(stored[0].read(TOKENIZER), name="tiny", eos="none")
    other = spec.delimited(eos=5, bos=7)
    assert (other.eos, other.bos) == (5, 7)
    assert {5, 7} <= set(other.special_tokens.values())
    assert spec.delimited(eos=1 << 20, bos=None).eos is None  # no token has this id


def test_another_file_or_none_is_refused(stored: tuple[Store, TokenizerInfo]) -> None:
    store, info = stored
    data = read_own(store, info)
    (Path(store.root) / TOKENIZER).write_bytes(data + b" ")
    for load in (read_own, lambda s, i: own_tokenizer(s, i, "tiny")):
        with pytest.raises(ValidationError, match="not the one the dataset was made with"):
            load(store, info)
    with pytest.raises(ValidationError, match="not the one the dataset was made with"):
        prompt_tokenizer(data + b" ", info, "here")
    (Path(store.root) / TOKENIZER).unlink()
    with pytest.raises(ValidationError, match=r"tokenizer\.json is missing"):
        own_tokenizer(store, info, "tiny")


@pytest.mark.parametrize(
    ("bos", "eos", "body", "delimiters"),
    [
        (None, None, [9, 1, 8], ()),
        (9, None, [1, 8], (9,)),
        (None, 8, [9, 1], (8,)),
        (9, 8, [1], (9, 8)),
    ],
)
def test_the_body_of_a_document_is_without_bos_and_eos(
    bos: int | None, eos: int | None, body: list[int], delimiters: tuple[int, ...]
) -> None:
    rules = TokenizerRules("", "", 10, bos, eos)
    assert (rules.body(np.array([9, 1, 8])).tolist(), rules.delimiters) == (body, delimiters)


def test_another_tokenizer_is_refused_before_it_is_tried(
    monkeypatch: pytest.MonkeyPatch, project: Project
) -> None:
    project.make([project.write("a.jsonl", texts(3))], "web")
    path = project / "web/tokenizer.json"
    model = json.loads(path.read_bytes())
    model["model"]["merges"][0][0] = "x" * 1_000_000
    path.write_text(json.dumps(model))
    monkeypatch.setattr("olm_data.dataset.tokenizer.probe", pytest.fail)
    with pytest.raises(ValidationError, match="not the one the dataset was made with"):
        _ = project.open("web").tokenizer
