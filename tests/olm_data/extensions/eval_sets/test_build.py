"""Questions to ids: encoded together, begun with BOS where there is one, spanned tokens counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from olm_data.dataset.eval_set import MANIFEST, EvalSet, Primary
from olm_data.errors import InputError, UsageError
from olm_data.extensions.eval_sets.tasks import Continuation, Question, Task, build
from olm_data.tokenizer.tokenizer import load_tokenizer


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
    output: str, tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = Task(
        "mine", Primary.acc, [Question([Continuation("the", " fox")], 0)], "mine", "", "mine"
    )
    with pytest.raises(UsageError):
        build(task, load_tokenizer(tiny_tokenizer), output)
    assert list(tmp_path.iterdir()) == []
