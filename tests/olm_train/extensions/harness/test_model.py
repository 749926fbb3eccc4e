"""The model of lm_eval: its answers are those of a plain loop over transformers' own Llama."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model, model_registry
from support.harness_tasks import questions, texts
from support.hf_twin import POSITIONS, plain_llama, save_both
from tokenizers import Tokenizer

from olm_data.errors import InputError, UsageError, ValidationError
from olm_train.checkpoint.text_rules import TextRules
from olm_train.extensions.generate.sampling import Sampling
from olm_train.extensions.harness.model import CHUNK, Answer, OlmLM, Wishes, answers, rows_of

PAIRS = [(each["context"], choice) for each in questions() for choice in each["choices"]]
PAIRS += [(" ", "fox"), ("", " dog")]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> tuple[Path, Path]:
    return save_both(tmp_path_factory.mktemp("both"), tiny_tokenizer)


@pytest.fixture(scope="module")
def theirs(both: tuple[Path, Path]) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(both[1], dtype=torch.float32).eval()


@pytest.fixture
def lm(both: tuple[Path, Path]) -> OlmLM:
    return OlmLM(both[0], max_length=POSITIONS)


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, n) for n, each in enumerate(arguments)]


def plain(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """One request, one forward pass, fp64 sums."""
    ids = torch.tensor([context + continuation])[:, -(POSITIONS + 1) :]
    with torch.no_grad():
        log_p = model(ids[:, :-1]).logits[0].double().log_softmax(-1)[-len(continuation) :]
    wanted = ids[0, -len(continuation) :]
    found = log_p.gather(1, wanted[:, None]).sum().item()
    return found, bool((log_p.argmax(-1) == wanted).all())


def encoded(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The rule of lm_eval: spaces go to the continuation, both are encoded together."""
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    before = tokenizer.encode(stripped).ids
    return before or [0], tokenizer.encode(stripped + continuation).ids[len(before) :]


def test_its_name_is_known_to_lm_eval() -> None:
    assert get_model("olm") is OlmLM
    assert "hf" in model_registry, "and those of its own still are"


@pytest.mark.parametrize("batch_size", ["auto", 1, "3"])
def test_continuations_score_as_in_a_plain_loop(
    both: tuple[Path, Path], theirs: Any, batch_size: str | int
) -> None:
    lm = OlmLM(both[0], max_length=POSITIONS, batch_size=batch_size)
    most = {"likely": 0}
    pairs = [*PAIRS]
    for context, _ in PAIRS[::5]:  # and what the model itself would say, which is greedy
        ids = lm.tok_encode(context.rstrip()) or [0]
        with torch.no_grad():
            best = int(theirs(torch.tensor([ids])).logits[0, -1].argmax())
        text = lm.loaded.text_of([best])
        if lm.tok_encode(context.rstrip() + text) == [*ids, best]:
            pairs.append((context.rstrip(), text))
            most["likely"] += 1
    found = lm.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    tokenizer = lm.loaded.tokenizer
    expected = [plain(theirs, *encoded(tokenizer, *pair)) for pair in pairs]
    assert [log_p for log_p, _ in found] == pytest.approx([p for p, _ in expected], rel=1e-5)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert most["likely"] > 2
    assert sum(greedy for _, greedy in found) >= most["likely"]


@pytest.mark.parametrize(
    ("size", "most", "rows", "written"),
    [(2, None, 2, 2), ("auto", None, 8, 9), ("auto:4", 3, 3, 3)],
)
def test_rows_and_texts_at_a_time_are_as_many_as_are_asked_for(
    both: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    size: str | int,
    most: int | None,
    rows: int,
    written: int,
) -> None:
    lm = OlmLM(both[0], max_length=POSITIONS, batch_size=size, max_batch_size=most)
    seen, forward = list[torch.Size](), lm.loaded.model.forward

    def watched(ids: torch.Tensor, **more: Any) -> Any:
        seen.append(ids.shape)
        return forward(ids, **more)

    monkeypatch.setattr(lm.loaded.model, "forward", watched)
    lm.loglikelihood(asked("loglikelihood", *PAIRS), disable_tqdm=True)
    assert {shape[0] for shape in seen} == {rows}
    seen.clear()
    wish = {"max_gen_toks": 3, "until": []}
    requests = asked("generate_until", *((text, wish) for text in texts()))
    lm.generate_until(requests, disable_tqdm=True)
    assert max(shape[0] for shape in seen) == written


@pytest.mark.parametrize("size", ["many", 0, -2])
def test_a_batch_size_that_is_none_is_refused(both: tuple[Path, Path], size: str | int) -> None:
    with pytest.raises(UsageError, match="a batch size is a number from 1 on"):
        OlmLM(both[0], max_length=POSITIONS, batch_size=size)


def test_what_a_request_loses_is_counted_and_said(
    lm: OlmLM, theirs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    long = " ".join(texts())
    pairs = [(long, " fox"), ("the", " fox"), (long, " dog")]
    with caplog.at_level(logging.WARNING):
        found = lm.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    tokens = len(lm.tok_encode(long + " fox"))
    assert "2 of 3 requests are longer than the 64 tokens" in caplog.text
    assert f"at most {tokens - 1 - POSITIONS:,} tokens" in caplog.text
    expected = [plain(theirs, *encoded(lm.loaded.tokenizer, *pair))[0] for pair in pairs]
    assert [log_p for log_p, _ in found] == pytest.approx(expected, rel=1e-5)
    assert lm.get_model_info()["requests_truncated"] == 2
    with pytest.raises(UsageError, match="tokens, and the model looks at 64"):
        lm.loglikelihood(asked("loglikelihood", ("the", long)), disable_tqdm=True)


def test_a_continuation_without_a_token_of_its_own_is_encoded_alone(lm: OlmLM, theirs: Any) -> None:
    found = lm._loglikelihood_tokens([(("th", "e"), [5, 7], [])], disable_tqdm=True)
    alone = lm.tok_encode("e", add_special_tokens=False)
    assert found[0][0] == pytest.approx(plain(theirs, [5, 7], alone)[0], rel=1e-5)
    with pytest.raises(UsageError, match="nothing to score"):
        lm._loglikelihood_tokens([(("th", ""), [5, 7], [])], disable_tqdm=True)


def test_bos_stands_before_each_context_once(lm: OlmLM) -> None:
    rules = dataclasses.replace(lm.loaded.rules, begins=3)
    lm.loaded = dataclasses.replace(lm.loaded, rules=rules)
    lm._bos = lm.loaded.text_of([3])
    assert lm.prefix_token_id == 3
    assert lm.eot_token_id == 0
    ids = lm.tok_encode("fox", add_special_tokens=False)
    assert lm.tok_encode("fox") == [3, *ids]
    assert lm.tok_encode(lm._bos + "fox")[:1] == [3] != lm.tok_encode(lm._bos + "fox")[1:2]
    context, continuation = lm._encode_pair("the quick", " fox")
    assert context[0] == 3
    assert 3 not in continuation
    lm.loaded = dataclasses.replace(lm.loaded, rules=TextRules())
    with pytest.raises(UsageError, match="neither BOS nor EOS"):
        _ = lm.prefix_token_id


def test_a_long_text_is_scored_in_windows_every_token_once(lm: OlmLM, theirs: Any) -> None:
    said = [*texts(), ""]
    found = lm.loglikelihood_rolling(
        asked("loglikelihood_rolling", *((text,) for text in said)), disable_tqdm=True
    )
    lengths = []
    for text, total in zip(said, found, strict=True):
        ids, expected = lm.tok_encode(text), 0.0
        lengths.append(len(ids))
        for begin in range(0, len(ids), POSITIONS):
            part = ids[begin : begin + POSITIONS]
            before = [0, *ids[: begin + len(part)]][: -len(part)]
            expected += plain(theirs, before[-(POSITIONS + 1 - len(part)) :], part)[0]
        assert total == pytest.approx(expected, rel=1e-5)
    assert max(lengths) > 2 * POSITIONS
    assert found[-1] == 0.0


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """The most likely tokens after ids, each from a pass over all before it."""
    for _ in range(count):
        with torch.no_grad():
            token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        if token == 0:
            break
        ids = [*ids, token]
    return ids


@pytest.mark.parametrize("batch_size", [1, "auto"])
def test_texts_are_the_most_likely_ones_up_to_a_stop_string(
    both: tuple[Path, Path], theirs: Any, batch_size: str | int
) -> None:
    lm = OlmLM(both[0], max_length=POSITIONS, batch_size=batch_size)
    contexts = [*texts()[:4], ""]
    wish = {"until": ["e", "\n"], "max_gen_toks": 12, "do_sample": False}
    found = lm.generate_until(
        asked("generate_until", *((context, wish) for context in contexts)), disable_tqdm=True
    )
    whole = []
    for context in contexts:
        ids = lm.tok_encode(context)[-(POSITIONS - 12) :] or [0]
        after = greedy(theirs, ids, 12)[len(ids) :]
        whole.append(lm.loaded.tokenizer.decode(after))
    expected = [text.split("e")[0].split("\n")[0] for text in whole]
    assert found == expected
    assert expected != whole, "a stop string was met"
    assert len(set(expected)) > 2


def test_a_prompt_that_leaves_no_room_is_cut_and_said(
    lm: OlmLM, caplog: pytest.LogCaptureFixture
) -> None:
    long = " ".join(texts())
    wish = {"max_gen_toks": 20}
    with caplog.at_level(logging.WARNING):
        text = lm.generate_until(asked("generate_until", (long, wish)), disable_tqdm=True)[0]
    assert "1 of 1 prompts and their answers are longer than the 64 tokens" in caplog.text
    assert lm.get_model_info()["requests_truncated"] == 1
    assert len(lm.tok_encode(text)) > 5
    with pytest.raises(UsageError, match="leaves no room for its prompt"):
        lm.generate_until(asked("generate_until", ("a", {"max_gen_toks": 64})))


def test_drawn_texts_differ_and_come_again(lm: OlmLM) -> None:
    wish = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 10}
    requests = asked("generate_until", *(("the", wish) for _ in range(3)))
    found = lm.generate_until(requests, disable_tqdm=True)
    assert len(set(found)) == 3
    assert lm.generate_until(requests, disable_tqdm=True) == found


def test_without_a_length_a_text_has_as_many_tokens_as_the_model_was_told(
    both: tuple[Path, Path],
) -> None:
    lm = OlmLM(both[0], max_length=POSITIONS, max_gen_toks=3)
    text = lm.generate_until(asked("generate_until", ("the", {})), disable_tqdm=True)[0]
    ids = greedy(lambda ids: _Logits(lm, ids), lm.tok_encode("the"), 3)
    assert text == lm.loaded.tokenizer.decode(ids[-3:])


class _Logits:
    def __init__(self, lm: OlmLM, ids: torch.Tensor) -> None:
        self.logits = lm.loaded.model(ids)


def test_logits_that_are_not_finite_are_an_error(lm: OlmLM) -> None:
    with torch.no_grad():
        lm.loaded.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValidationError, match="non-finite"):
        lm.generate_until(asked("generate_until", ("the", {"max_gen_toks": 2})))


def test_conversations_are_made_by_the_template_that_is_given(
    both: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    said = [{"role": "user", "content": "hello"}]
    plain_one = OlmLM(both[0], max_length=POSITIONS)
    assert plain_one.apply_chat_template(said) == "User: hello\nAssistant:"
    own = OlmLM(both[0], max_length=POSITIONS, template=str(tmp_path / "t.jinja"))
    assert own.apply_chat_template(said) == "<user>hello"
    assert own.chat_template(True) == str(tmp_path / "t.jinja")
    assert own.chat_template(False) is None
    assert own.tokenizer_name != plain_one.tokenizer_name
    with pytest.raises(UsageError, match="begins the answer itself"):
        own.apply_chat_template(said, add_generation_prompt=False)
    with pytest.raises(UsageError, match="no templates with names"):
        own.chat_template("default")


def test_a_length_is_known_or_asked_for(both: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="nobody recorded how long"):
        OlmLM(both[0])
    with pytest.raises(UsageError, match="max_length is 0"):
        OlmLM(both[0], max_length=0)
    with pytest.raises(InputError):
        OlmLM(both[0] / "not-there")


def test_without_the_device_that_is_asked_for_it_says_what_it_uses(
    both: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with caplog.at_level(logging.WARNING):
        lm = OlmLM(both[0], max_length=POSITIONS, device="cuda:0")  # what lm_eval asks for
    assert str(lm.device) == "cpu"
    assert "the CPU is used instead of cuda:0" in caplog.text


def test_a_model_of_transformers_needs_no_export(lm: OlmLM, both: tuple[Path, Path]) -> None:
    same = OlmLM(both[1])  # its length stands in its config.json
    assert same.max_length == POSITIONS
    assert same.get_model_info()["model_checkpoint"] == "theirs"
    requests = asked("loglikelihood", *PAIRS)
    found = same.loglikelihood(requests, disable_tqdm=True)
    expected = lm.loglikelihood(requests, disable_tqdm=True)
    assert [each for each, _ in found] == pytest.approx([e for e, _ in expected], rel=1e-4)


CPU = torch.device("cpu")


def test_answers_come_in_order_and_are_told_as_soon_as_they_are_known() -> None:
    model = plain_llama(50)
    pairs = [([n + 1] * (1 + n % 3), [n + 2, n + 3][: 1 + n % 2]) for n in range(12)]
    told: dict[int, Answer] = {}

    def keep(number: int, answer: Answer) -> None:
        told[number] = answer

    rows = rows_of(pairs, 9, 2, CPU)
    found = answers(model, rows, CPU, keep, quiet=True)
    assert rows.rows < len(pairs)
    assert [told[number] for number in range(len(pairs))] == found
    for (context, continuation), (log_p, greedy) in zip(pairs, found, strict=True):
        ids = torch.tensor([context + continuation])
        with torch.no_grad():
            logits = model(ids[:, :-1])[0, len(context) - 1 :].double()
        wanted = torch.tensor(continuation)
        expected = logits.log_softmax(-1).gather(1, wanted[:, None]).sum()
        assert log_p == pytest.approx(expected.item(), rel=1e-5)
        assert greedy == bool((logits.argmax(-1) == wanted).all())


def test_a_continuation_of_more_tokens_than_a_chunk_is_whole() -> None:
    model = plain_llama(50)
    ids = [n % 50 for n in range(CHUNK + 40)]
    ((log_p, _),) = answers(model, rows_of([([3], ids)], 2 * CHUNK, 1, CPU), CPU, quiet=True)
    with torch.no_grad():
        logits = model(torch.tensor([[3, *ids[:-1]]]))[0].double()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum().item()
    assert log_p == pytest.approx(expected, rel=1e-5)


def test_a_continuation_that_does_not_fit_is_refused() -> None:
    assert rows_of([([1] * 9, [2] * 5)], 5, 1, CPU).lost.tolist() == [8]
    with pytest.raises(UsageError, match="a continuation has 6 tokens, and the model looks at 5"):
        rows_of([([1] * 9, [2] * 5), ([1], [2] * 6)], 5, 1, CPU)


GREEDY = Sampling(temperature=0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Wishes((), 7, GREEDY)),
        ({"until": "x", "do_sample": False, "temperature": 0.7}, Wishes(("x",), 7, GREEDY)),
        ({"until": ["x", "y"], "max_gen_toks": 3}, Wishes(("x", "y"), 3, GREEDY)),
        ({"max_new_tokens": 4, "max_tokens": 5}, Wishes((), 4, GREEDY)),
        ({"temperature": 0.7}, Wishes((), 7, Sampling(temperature=0.7))),
        ({"do_sample": True}, Wishes((), 7, Sampling(temperature=1.0))),
        ({"do_sample": True, "temperature": 0.0, "num_beams": 1}, Wishes((), 7, GREEDY)),
        (
            {"do_sample": True, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 4},
            Wishes((), 7, Sampling(temperature=1, top_k=3, top_p=0.5, min_p=0.1, seed=4)),
        ),
        (
            {"repetition_penalty": 1.5, "top_k": -1},
            Wishes((), 7, Sampling(temperature=0, repetition_penalty=1.5)),
        ),
    ],
)
def test_wishes_are_read(given: dict[str, Any], expected: Wishes) -> None:
    assert Wishes.of(given, 7) == expected


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"length_penalty": 2}, "length_penalty, which is not known here"),
        ({"num_beams": 4}, "no beam search"),
        ({"max_gen_toks": 0}, "1 token or more"),
        ({"temperature": -1}, "temperature is a number from 0 on"),
    ],
)
def test_what_is_not_known_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Wishes.of(given, 7)
