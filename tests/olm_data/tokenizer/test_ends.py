"""Which token ends documents: what is asked for, configured, or well known; else it is asked."""

from __future__ import annotations

import pytest

from olm_data.errors import UsageError
from olm_data.tokenizer.tokenizer import configured_eos, end_token


@pytest.mark.parametrize(
    ("eos", "configured", "ends"),
    [("none", "<stop>", None), ("<a>", "<stop>", "<a>"), ("auto", "<stop>", "<stop>")],
)
def test_what_is_asked_for_comes_before_what_is_configured(
    eos: str, configured: str, ends: str | None
) -> None:
    assert end_token(eos, {"</s>": 1}, configured, "t") == ends


def test_one_well_known_name_is_taken_and_of_two_none() -> None:
    assert end_token("auto", {"<pad>": 0, "</s>": 1}, None, "t") == "</s>"
    with pytest.raises(UsageError, match="several tokens may end"):
        end_token("auto", {"<eos>": 0, "</s>": 1}, None, "t")
    with pytest.raises(UsageError, match="cannot tell") as caught:
        end_token("auto", {"[SEP]": 0}, None, "t")
    assert "[SEP]" in str(caught.value.where)


@pytest.mark.parametrize(
    ("config", "token"),
    [
        (None, None),
        (b"{}", None),
        (b'{"eos_token": "</s>"}', "</s>"),
        (b'{"eos_token": {"content": "</s>"}}', "</s>"),
        (b'{"eos_token": 3}', None),
    ],
)
def test_the_configured_token_is_a_string_or_an_object_with_one(
    config: bytes | None, token: str | None
) -> None:
    assert configured_eos(config, "t") == token
