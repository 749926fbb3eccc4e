"""Questions to ids: encoded together, begun with BOS where there is one, spanned tokens counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from olm_data.errors import UsageError
from olm_data.eval_sets.build import build
from olm_data.eval_sets.eval_set import EvalSet, Primary
from olm_data.eval_sets.tasks import Choice, Question, Task
from olm_data.tokenizer.tokenizer import load_tokenizer


def made(folder: Path, tokenizer: Path, *pairs: tuple[str, str], **ends: str) -> EvalSet:
    choices = [Choice(*pair) for pair in pairs]
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
