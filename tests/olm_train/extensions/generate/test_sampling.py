"""What is drawn, by a seed alone; the text while it is written; prompts of conversations."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_tokenizer import train
from support.tokenizer_kinds import bpe, unigram
from tokenizers import Tokenizer

from olm_data.errors import InputError, UsageError
from olm_train.extensions.generate.sampling import Sampling, choose, probabilities, uniform
from olm_train.extensions.generate.template import ChatTemplate, Message
from olm_train.extensions.generate.text import Stops, TextStream

LOGITS = torch.tensor([[0.0, 1.0, 0.9, -1.0, 1.0]])


def shares(logits: torch.Tensor = LOGITS, **wish: float) -> list[float]:
    found = probabilities(logits.clone(), [Sampling(**wish)])[0]  # type: ignore[arg-type]
    return [round(value, 4) for value in (found / found.sum()).tolist()]


def softmax(*values: float) -> list[float]:
    return [round(v, 4) for v in torch.tensor(values, dtype=torch.float64).softmax(-1).tolist()]


INF = math.inf


def test_each_option_leaves_out_what_it_says() -> None:
    assert shares() == softmax(0, 1, 0.9, -1, 1)
    assert shares(temperature=2.0) == softmax(0, 0.5, 0.45, -0.5, 0.5)
    assert shares(top_k=3) == softmax(-INF, 1, 0.9, -INF, 1)
    assert shares(top_k=1) == softmax(-INF, 1, -INF, -INF, 1)  # equals stay
    assert shares(top_k=9) == shares()
    assert shares(top_p=0.3) == softmax(-INF, 1, -INF, -INF, 1)  # 0.2976 is too little
    assert shares(top_p=0.29) == softmax(-INF, 1, -INF, -INF, -INF)
    assert shares(min_p=0.5) == softmax(-INF, 1, 0.9, -INF, 1)
    assert shares(min_p=1.0) == softmax(-INF, 1, -INF, -INF, 1)
    assert shares(top_k=3, top_p=0.5) == softmax(-INF, 1, -INF, -INF, 1)
    assert shares(temperature=1e-300) == softmax(-INF, 1, -INF, -INF, 1)


def test_temperature_zero_takes_the_most_likely_of_equals_the_first() -> None:
    assert choose(LOGITS.clone(), [Sampling(temperature=0)], [0], [None]) == [1]


def test_a_penalty_makes_tokens_that_were_there_less_likely() -> None:
    wish = Sampling(temperature=0, repetition_penalty=2.0)
    logits = torch.tensor([[-1.0, 1.0, 0.9, -1.9]])
    assert choose(logits.clone(), [wish], [0], [torch.tensor([1])]) == [2]
    lower = torch.tensor([[-1.0, -1.9]])
    assert choose(lower.clone(), [wish], [0], [torch.tensor([0])]) == [1]


wishes = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.2, 0.7, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.6]),
    seed=st.integers(0, 5),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(wishes, st.integers(0, 9)), min_size=1, max_size=6), st.integers(0, 99))
def test_a_row_is_the_same_beside_any_others(rows: list[tuple[Sampling, int]], seed: int) -> None:
    logits = torch.randn(len(rows), 11, generator=torch.Generator().manual_seed(seed))
    logits = (logits * 2).round() / 2  # with equals
    given_, numbers = [row for row, _ in rows], [number for _, number in rows]
    together = choose(logits.clone(), given_, numbers, [None] * len(rows))
    alone = [
        choose(logits[n : n + 1].clone(), [wish], [number], [None])[0]
        for n, (wish, number) in enumerate(rows)
    ]
    assert together == alone


def test_draws_have_the_probabilities_that_are_said() -> None:
    wish = [Sampling(temperature=1.0, top_k=4, seed=seed) for seed in range(4000)]
    drawn = choose(LOGITS.repeat(4000, 1), wish, [3] * 4000, [None] * 4000)
    counts = torch.tensor(drawn).bincount(minlength=5) / 4000
    expected = torch.tensor(shares(top_k=4))
    assert (counts - expected).abs().max() < 0.03
    assert not counts[expected == 0].any()


def test_random_numbers_are_those_of_splitmix64() -> None:
    # Of the reference implementation with the state 1234567 (prng.di.unimi.it/splitmix64.c).
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [uniform(1234567, n) for n in range(3)] == [(x >> 11) * 2.0**-53 for x in first]


@pytest.mark.parametrize(
    "wish",
    [
        {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": -1.0}, {"top_k": -1},
        {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": -0.1}, {"repetition_penalty": 0.0}, {"seed": -1},
        {"repetition_penalty": 1e-300}, {"repetition_penalty": 1e300}, {"temperature": -5e-324},
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_refused(wish: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wish))):
        Sampling(**wish)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-45, 1.0, 1e308])
@pytest.mark.parametrize("penalty", [1.18e-38, 1e-3, 1.0, 1e3, 3.4e38])
@pytest.mark.parametrize("share", [5e-324, 1e-45, 1.0])
def test_every_number_that_is_taken_chooses_an_id_of_the_vocabulary(
    temperature: float, penalty: float, share: float
) -> None:
    logits = torch.tensor([[3e38, 5.0, 0.0, -5.0, -3e38], [0.0, 0.0, 0.0, 0.0, 0.0]])
    for top_k, top_p, min_p in ((0, share, 0.0), (1 << 70, 1.0, share), (2, share, share)):
        wish = Sampling(temperature=temperature, repetition_penalty=penalty, top_k=top_k,
                        top_p=top_p, min_p=min_p)  # fmt: skip
        for seen in (torch.arange(5), torch.arange(4), None):
            found = choose(logits.clone(), [wish] * 2, [0, 1 << 40], [seen] * 2)
            assert all(0 <= token < 5 for token in found)


WORDS = "the cat sat; été 中文 🙂🙃 x"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(str(train(tmp_path_factory.mktemp("text") / "tokenizer.json")))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 299), max_size=30), st.integers(0, 30))
def test_pieces_are_the_text_of_all_ids(byte_level: Tokenizer, ids: list[int], cut: int) -> None:
    ids = [*byte_level.encode(WORDS).ids, *ids]
    prompt, rest = ids[:cut], ids[cut:]
    stream = TextStream(byte_level, prompt)
    pieces = [stream.push(token) for token in rest]
    whole = "".join(pieces) + stream.flush()
    text = byte_level.decode(ids, skip_special_tokens=False)
    assert not any(piece.endswith("\ufffd") for piece in pieces)
    before = byte_level.decode(prompt, skip_special_tokens=False)
    if not before.endswith("\ufffd"):
        assert before + whole == text
    else:
        assert text.endswith(whole)


def test_a_character_is_given_as_a_whole(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level)
    pieces = [stream.push(token) for token in byte_level.encode("a🙂b").ids]
    assert pieces == ["a", "", "", "", "🙂", "b"]


@pytest.mark.parametrize("kind", [bpe, unigram])
def test_other_kinds_of_tokenizers_go_on_as_they_began(kind: object) -> None:
    tokenizer = Tokenizer.from_str(kind().decode())  # type: ignore[operator]
    ids = tokenizer.encode("the cat sat on the mat", add_special_tokens=False).ids
    for cut in range(1, len(ids)):
        stream = TextStream(tokenizer, ids[:cut])
        text = "".join(map(stream.push, ids[cut:])) + stream.flush()
        assert tokenizer.decode(ids[:cut]) + text == tokenizer.decode(ids)


def test_a_text_ends_before_its_first_stop_string_and_shows_no_part_of_it() -> None:
    stops = Stops(["\nUser:", "END"])
    shown = []
    for piece in ("one\n", "Us", "e me E", "N", "D more\nUser:"):
        stops.push(piece)
        shown.append(stops.text[: stops.certain])
    assert shown == ["one", "one", "one\nUse me ", "one\nUse me ", "one\nUse me "]
    assert (stops.ended, stops.text) == (True, "one\nUse me ")


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_what_is_certain_stays(text: str, strings: list[str]) -> None:
    stops, seen = Stops(strings), ""
    for character in text:
        stops.push(character)
        certain = stops.text[: stops.certain]
        assert certain.startswith(seen)
        seen = certain
        if stops.ended:
            break
    places = [text.find(each) for each in strings if each in text]
    expected = text if not places else None
    if expected is not None:
        assert stops.text == expected
    else:
        assert stops.ended
        assert not any(each in stops.text for each in strings)


def test_no_stop_string_holds_nothing_back(tmp_path: Path) -> None:
    stops = Stops([""])
    stops.push("anything")
    assert (stops.certain, stops.ended) == (8, False)


TURNS = [Message("system", "Be short."), Message("user", "Hi"), Message("assistant", " Ho. ")]
CHATML = """\
{%- for m in messages %}
    {%- if m['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('no such role') }}
    {%- endif %}
    {{- '<|im_start|>' + m['role'] + '\\n' + m['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def template(folder: Path, text: str) -> ChatTemplate:
    path = folder / "chat_template.jinja"
    path.write_text(text)
    return ChatTemplate.read(path, {"eos_token": "</s>"})


def test_without_a_template_there_are_lines_with_names() -> None:
    plain = ChatTemplate()
    assert plain.prompt([*TURNS, Message("user", "Bye")]) == (
        "Be short.\n\nUser: Hi\nAssistant: Ho.\nUser: Bye\nAssistant:"
    )
    assert plain.stops == ("\nUser:",)


def test_a_template_of_transformers_works_as_it_is(tmp_path: Path) -> None:
    found = template(tmp_path, CHATML)
    assert found.prompt(TURNS[:2]) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert found.stops == ()
    assert template(tmp_path, "{{ bos_token }}|{{ eos_token }}").prompt(TURNS) == "|</s>"
    with pytest.raises(UsageError, match="no such role"):
        found.prompt([Message("tool", "x")])


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages | tojson }}|{{ {'a': '<é>'} | tojson(indent=2) }}",
        "{% if tools is not none %}tools{% endif %}{{ documents is defined }}",
        "{{ strftime_now('%Y') }}",
        "{%- for m in messages -%}{% generation %}{{ m.content }}{% endgeneration %}{%- endfor %}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}",
    ],
)
def test_names_in_a_template_mean_what_they_do_in_transformers(tmp_path: Path, text: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": each.role, "content": each.content} for each in TURNS]
    (expected,), _ = render_jinja_template(
        [messages], chat_template=text, add_generation_prompt=True
    )
    assert template(tmp_path, text).prompt(TURNS) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        # all memory, folded while it is read or not; text without end; no end of nesting
        "{{ 'a' * 10 ** 11 }}",
        "{{ messages[0].content * 10 ** 10 }}",
        "{% set n = namespace(a='a') %}{% for i in range(40) %}{% set n.a = n.a * 2 %}{% endfor %}",
        "{% for i in range(9999) %}" + "a" * 9999 + "{% endfor %}",
        "{{ 'x' * 5000000 }}",
        "{{ strftime_now('%Y' * 10 ** 9) }}",
        "{{ '%1000000000000d' | format(1) }}",
        "{{ messages[0].content.ljust(10 ** 12) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% if x %}" * 3000 + "{% endif %}" * 3000,
        "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
        # what is wrong with a value is no error of Jinja's
        "{{ 1 / 0 }}", "{{ messages['x'].y.z }}", "{{ [].pop() }}", "{{ {}['a'] + 1 }}",
        "{{ 'a'.encode('nonsense') }}", "{{ lipsum }}{{ cycler()() }}", "{{ ''.join(5) }}",
        "{{ messages | tojson(indent=messages) }}", "{{ '%s %s' | format(1) }}",
    ],
)  # fmt: skip
def test_a_template_can_write_a_prompt_and_nothing_else(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError):
        template(tmp_path, text).prompt(TURNS)


@pytest.mark.slow
def test_a_template_without_end_is_ended(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="seconds of processor time"):
        template(tmp_path, "{{ 7 ** (10 ** 9) }}").prompt(TURNS)  # in one call of C


def test_a_failed_prompt_leaves_the_template_usable(tmp_path: Path) -> None:
    found = template(tmp_path, "{{ messages[0].content * messages | length ** 30 }}")
    with pytest.raises(InputError, match="the chat template cannot be used") as error:
        found.prompt(TURNS)
    assert error.value.exit_code == 4
    assert found.prompt(TURNS[1:2]) == "Hi"
    with ThreadPoolExecutor(8) as pool:
        asked = [Message("user", "x" * n) for n in range(1, 50)]
        assert list(pool.map(lambda each: found.prompt([each]), asked)) == [
            each.content for each in asked
        ]


def test_what_is_no_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no Jinja template"):
        template(tmp_path, "{% for %}")
    with pytest.raises(InputError, match="no such template"):
        ChatTemplate.read(tmp_path / "nowhere", {})
