"""YAML read strictly, values and where they came from, import paths."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from olm_data.config.import_path import import_path, load_class
from olm_data.config.strict_yaml import load, parse_value
from olm_data.config.values import KeyPath, Values, dotted, parse_path, put
from olm_data.errors import OlmError, UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-7", -7),
        ("2_000_000", 2_000_000),
        ("9223372036854775807", 2**63 - 1),
        ("0.1", Fraction(1, 10)),
        ("1.10", Fraction(11, 10)),
        ("-.5", Fraction(-1, 2)),
        ("3e-4", Fraction(3, 10_000)),
        ("1E3", Fraction(1000)),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ('"true"', "true"),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("0x10", "0x10"),
        ("95B", "95B"),
        ("information", "information"),
        ("s3://bucket/path", "s3://bucket/path"),
        ("[1, {a: 2}]", [1, {"a": 2}]),
        ("|\n  two\n  lines\n", "two\nlines\n"),
    ],
)
def test_a_spelling_has_one_meaning(text: str, value: Any) -> None:
    found = load(f"key: {text}", "m.yaml").value["key"]
    assert found == value
    assert type(found) is type(value)


@given(st.integers(-(10**18), 10**18), st.integers(0, 300))
def test_decimals_are_exact_as_typed(mantissa: int, exponent: int) -> None:
    assert load(f"x: {mantissa}e-{exponent}", "m").value["x"] == Fraction(mantissa, 10**exponent)


def test_numbers_are_floats_where_floats_are_asked_for() -> None:
    value = load("lr: 3e-4\nsteps: 10", "train.yaml", numbers="float").value
    assert value == {"lr": 3e-4, "steps": 10}
    assert type(value["lr"]) is float
    assert type(value["steps"]) is int


REFUSED = [
    ("a: 1\nb: &x 1", 2, "anchor &x"),
    ("a: 1\nb: *x", 2, "alias *x"),
    ("a:\n  <<: {b: 1}", 2, "merge key"),
    ("a: !!str 1", 1, "tag"),
    ("a: !!python/object/apply:os.system [ls]", 1, "tag"),
    ("a: ! 1", 1, "tag"),
    ("%TAG ! tag:x,2000:\n---\na: 1", 1, "%TAG"),
    ("a: 1\nb: 2\na: 3", 3, "'a' appears here twice"),
    ("a:\n  - {b: 1, b: 1}", 2, "'b' appears here twice"),
    ("a: 1\n---\nb: 2", 2, "second document"),
    ("a: .nan", 1, "not a finite number"),
    ("a: NaN", 1, "not a finite number"),
    ("a: -.INF", 1, "not a finite number"),
    ("a: Infinity", 1, "not a finite number"),
    ("a: 9223372036854775808", 1, "larger than 2^63"),
    ("a: -9223372036854775808", 1, "larger than 2^63"),
    ("a: 1e401", 1, "out of range"),
    ("a: 1e999999999999", 1, "out of range"),
    ("a: 010", 1, "leading zero"),
    ("a: 1\n? [b]\n: 2", 2, "key must be plain text"),
    ("a:\n\t- 1", 2, "not valid YAML"),
    ("a: b: c", 1, "not valid YAML"),
    ("a: 1\nb: }", 2, "not valid YAML"),
    ("a: 1\nb: \x01", 2, "not valid YAML"),
    ("a: \ud800", 1, "UTF-8"),
    (b"a: 1\nb: \xff", 2, "UTF-8"),
    ("[" * 21 + "]" * 21, 1, "levels"),
]


@pytest.mark.parametrize(("text", "line", "message"), REFUSED)
def test_what_is_ambiguous_is_refused_with_its_line(
    text: str | bytes, line: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message.replace("^", r"\^").replace("*", r"\*")) as error:
        load(text, "m.yaml")
    assert (error.value.where, error.value.exit_code) == (f"m.yaml:{line}", 2)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_file_has_no_silent_meaning(text: str) -> None:
    if text.startswith("---"):
        assert load(text, "m.yaml").value is None
        return
    with pytest.raises(UsageError, match="empty"):
        load(text, "m.yaml")


def test_twenty_levels_and_a_megabyte_are_allowed_and_no_more() -> None:
    load("[" * 20 + "]" * 20, "m.yaml")
    load("a: " + "x" * (2**20 - 3), "m.yaml")
    with pytest.raises(UsageError, match="bytes"):
        load("a: " + "x" * (2**20 - 2), "m.yaml")


def test_lines_are_known_for_every_key_and_fall_back_to_the_enclosing_one() -> None:
    values = Values.parse("a: 1\nb:\n  c: [1,\n    2]\n  d: {e: 5}\n", "dir/m.yaml")
    assert (values.where(("a",)), values.where(("b", "c"))) == ("dir/m.yaml:1", "dir/m.yaml:3")
    assert values.where(("b", "c", 1)) == "dir/m.yaml:4"
    assert values.where(("b", "d", "e")) == "dir/m.yaml:5"
    assert values.where(("b", "d", "missing", 3)) == "dir/m.yaml:5"
    assert values.where(("missing",)) == "dir/m.yaml:1"


def test_a_file_name_cannot_forge_output() -> None:
    with pytest.raises(UsageError) as error:
        load("a: 1\na: 1", "m\n\x1b[31m.yaml")
    assert "\n\x1b" not in str(error.value)


def test_a_file_is_read_from_disk_and_a_missing_one_is_an_error_of_use(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("a: é\n", encoding="utf-8")
    assert Values.read(path).data == {"a": "é"}
    with pytest.raises(UsageError, match="cannot read the configuration") as missing:
        Values.read(tmp_path / "none.yaml")
    assert "train.yaml" in str(missing.value.fix)
    with pytest.raises(UsageError, match="cannot read"):
        Values.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e9", 1e9),
        ("5", 5),
        (" true ", True),
        ("", None),
        ("[1, 2.5, x]", [1, 2.5, "x"]),
        ("{a: 1}", {"a": 1}),
        ("'7'", "7"),
        ("s3://bucket/x?y#z", "s3://bucket/x?y#z"),
        ("*.jsonl", "*.jsonl"),
        ("a: b", "a: b"),
        ("!!python/none", "!!python/none"),
        ("&x", "&x"),
        ("- 1", "- 1"),
    ],
)
def test_command_line_values_need_no_quoting(text: str, value: Any) -> None:
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["nan", "1e999", "007", "[1", "{a: 1, a: 2}", "[&x 1]"])
def test_command_line_values_are_refused_for_the_same_reasons(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_value(text, where="--lr")
    assert (error.value.where or "").startswith("--lr")


def test_an_option_is_one_word_or_two() -> None:
    values = Values({"a": {"b": 1}})
    values.override_all(["--a.b=2", "--a.c", "x=y", "--d", "[1, 2]"])
    assert values.data == {"a": {"b": 2, "c": "x=y"}, "d": [1, 2]}
    assert values.where(("a", "c")) == "--a.c"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--a"], "--a has no value"),
        (["--a", "--b=1"], "--a has no value"),
        (["--dry-rn", "1"], "did you mean '--dry-run'?"),
        (["-a", "1"], "unknown option -a"),
        (["--a..b=1"], "cannot read the option"),
    ],
)
def test_what_is_no_option_is_refused(words: list[str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        Values({}).override_all(words, known=["--dry-run", "--help"])
    assert says in str(caught.value)


def test_an_option_that_would_be_lost_is_refused() -> None:
    whole, part = "--optim={name: lion}", "--optim.lr=0.5"
    values = Values({})
    values.override_all([whole, part, "--optim.lr=0.7"])
    assert values.data == {"optim": {"name": "lion", "lr": 0.7}}
    with pytest.raises(UsageError, match=r"--optim replaces what --optim\.lr gives"):
        Values({}).override_all([part, whole])


# Names of places: spelled and read back, and values put where they say.
KEYS = st.text(max_size=6).filter(lambda key: not ('"' in key and "'" in key))


@given(st.tuples(KEYS), st.lists(KEYS | st.integers(0, 99), max_size=5))
def test_a_path_is_read_back_as_it_was_spelled(first: tuple[str], rest: list[str | int]) -> None:
    path: KeyPath = (*first, *rest)
    assert parse_path(dotted(path)) == path


@pytest.mark.parametrize("text", ["", "[0]", "a..b", ".a", "a.", "a[x]", "a[0", "a]b", "a[0]b"])
def test_what_spells_no_path_is_none(text: str) -> None:
    assert parse_path(text) is None


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--list[1]=9", {"list": [1, 9, {"x": 3}]}),
        ("--list[2].x=9", {"list": [1, 2, {"x": 9}]}),
        ("--list[2].y.z=9", {"list": [1, 2, {"x": 3, "y": {"z": 9}}]}),
        ("--list[3]={a: 1}", {"list": [1, 2, {"x": 3}, {"a": 1}]}),  # one more
        ("--list=[4]", {"list": [4]}),
        ("--map.a=1", {"list": [1, 2, {"x": 3}], "map": {"a": 1}}),
        ('--map["a.b=c"]=1', {"list": [1, 2, {"x": 3}], "map": {"a.b=c": 1}}),
        ("--map['a.b'].c==", {"list": [1, 2, {"x": 3}], "map": {"a.b": {"c": "="}}}),
    ],
)
def test_an_option_reaches_into_lists_and_mappings(option: str, expected: Any) -> None:
    values = Values({"list": [1, 2, {"x": 3}]})
    values.override(option)
    assert values.data == expected


@pytest.mark.parametrize(
    ("path", "says", "fix"),
    [
        (("list", 3), "list has 2 items, there is no [3]", "[2] adds one"),
        (("list", 5, "x"), "list has 2 items", "[2] adds one"),
        (("list", "x"), "list is a list", None),
        (("one", "x"), "one is a value, it has no fields", None),
        (("gone", 0), "gone is not a list in the file", "--gone='[...]'"),
        (("one", 0), "one is not a list in the file", "--one='[...]'"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path: KeyPath, says: str, fix: str | None) -> None:
    data: dict[str, Any] = {"list": [1, 2], "one": 1}
    with pytest.raises(UsageError) as caught:
        put(data, path, 0, where="--option")
    assert says in caught.value.what
    assert (fix or "") in (caught.value.fix or "")


@pytest.mark.parametrize("kind", [OlmError, UsageError, Path])
def test_a_class_comes_back_by_its_path(kind: type) -> None:
    assert load_class(import_path(kind), object, where="here") is kind


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("olm_data.errors", "no import path"),
        ("olm_data.errors:", "no import path"),
        ("a b:C", "no import path"),
        ("no_such_lab:C", "no module no_such_lab"),
        ("olm_data.errors:UsageEror", "did you mean 'UsageError'"),
        ("olm_data.errors:printable", "not a subclass of OlmError"),
        ("pathlib:Path", "not a subclass of OlmError"),
        ("broken_lab:C", "broken_lab cannot be imported: ZeroDivisionError"),
        ("needs_lab:C", "there is no module gone_lab"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_with_its_place(
    path: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_lab.py").write_text("1 / 0\n")
    (tmp_path / "needs_lab.py").write_text("import gone_lab\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError) as raised:
        load_class(path, OlmError, where="train.yaml:3")
    assert says in str(raised.value)
    assert "train.yaml:3" in str(raised.value)
