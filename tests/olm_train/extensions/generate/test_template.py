"""Prompts of conversations: plain words, or a Jinja template in a sandbox."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from olm_data.errors import InputError, UsageError
from olm_train.extensions.generate.template import ChatTemplate, Message

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
