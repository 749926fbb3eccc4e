"""Values become typed configs, or an error that names line, type and nearest name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from olm_data.config import strict_yaml
from olm_data.config.convert import Config, as_dict, parse
from olm_data.config.hints import FilePath, ReadBy
from olm_data.config.values import KeyPath, Values, differences, dotted
from olm_data.errors import UsageError


def read_share(value: Any) -> Fraction:
    try:
        return Fraction(value)
    except (TypeError, ValueError):
        raise UsageError(f"{value!r} is not a share", fix="write 1/3") from None


Share = Annotated[Fraction, ReadBy(read_share, "a share", {"type": "string"})]
Name = Annotated[str, Meta(pattern="^[a-z]+$", description="a word of small letters")]


class Color(StrEnum):
    red = "red"
    blue = "blue"


@dataclass(frozen=True, kw_only=True)
class Adam:
    name: Literal["adam"] = "adam"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True, kw_only=True)
class Lion:
    name: Literal["lion"] = "lion"
    lr: float = 1e-4


@dataclass(frozen=True, kw_only=True)
class Inner(Config):
    steps: Annotated[int, Meta(ge=1)]
    color: Color = Color.red

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps == 13 and self.color is Color.blue:
            raise UsageError("13 steps are not blue", where="color", fix="write red")


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    rate: float = 1.0
    flag: bool = False
    label: str = ""
    limit: int | None = None
    optim: Adam | Lion = field(default_factory=Adam)
    skip: list[list[int]] = field(default_factory=list)
    files: dict[str, FilePath] = field(default_factory=dict)
    verify: Literal["lazy", "off"] = "lazy"
    share: Share = Fraction(1)
    rates: dict[Name, Annotated[float, Meta(gt=0, le=1)]] = field(default_factory=dict)
    sizes: Annotated[list[int], Meta(min_length=1)] | None = None


def from_text(tmp_path: Path, text: str, *overrides: str) -> Outer:
    (tmp_path / "c.yaml").write_text(text)
    values = Values.read(tmp_path / "c.yaml")
    for override in overrides:
        values.override(override)
    return parse(Outer, values)


def refusal(tmp_path: Path, text: str, *overrides: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        from_text(tmp_path, text, *overrides)
    return caught.value


MINIMAL = "inner: {steps: 3}\n"


def test_defaults_fill_what_the_file_leaves_out(tmp_path: Path) -> None:
    assert from_text(tmp_path, MINIMAL) == Outer(inner=Inner(steps=3))


def test_a_text_stands_for_the_component_of_that_name(tmp_path: Path) -> None:
    text = MINIMAL + "optim: lion\n"
    assert from_text(tmp_path, text).optim == Lion()
    assert from_text(tmp_path, text, "--optim.lr=3e-2").optim == Lion(lr=3e-2)
    error = refusal(tmp_path, MINIMAL + "optim: lyon\n")
    assert (error.what, error.fix) == ("optim has no kind called 'lyon'", "did you mean 'lion'?")
    assert str(error.where).endswith("c.yaml:2")
    assert "inner is a mapping" in refusal(tmp_path, "inner: three\n").what  # it has no names


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("--rate=3e-4", ("rate",), 3e-4),
        ("--rate=2", ("rate",), 2.0),
        ("--inner.steps=1e3", ("inner", "steps"), 1000),
        ("--inner.steps=1.5M", ("inner", "steps"), 1_500_000),
        ("--inner={steps: 7, color: blue}", ("inner",), Inner(steps=7, color=Color.blue)),
        ("--flag=true", ("flag",), True),
        ("--label=a: b", ("label",), "a: b"),
        ("--limit=5", ("limit",), 5),
        ("--limit=null", ("limit",), None),
        ("--optim={name: lion}", ("optim",), Lion()),
        ("--optim=lion", ("optim",), Lion()),
        ("--optim.lr=1e-2", ("optim",), Adam(lr=1e-2)),
        ("--optim.betas=[0.8, 0.9]", ("optim", "betas"), (0.8, 0.9)),
        ("--skip=[[1, 4], [8, 9]]", ("skip",), [[1, 4], [8, 9]]),
        ("--verify=off", ("verify",), "off"),
    ],
)
def test_each_kind_of_field_can_be_overridden(
    tmp_path: Path, override: str, path: tuple[str, ...], value: Any
) -> None:
    found: Any = from_text(tmp_path, MINIMAL, override)
    for part in path:
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "says", "fix"),
    [
        ("inner: {steps: 3}\nrtae: 1\n", 2, "unknown field rtae", "did you mean 'rate'?"),
        ("inner:\n  steps: 3\n  colour: red\n", 3, "inner.colour", "did you mean 'color'?"),
        ("inner: {steps: 3}\nrate: fast\n", 2, "rate is a number, not 'fast'", None),
        ("inner: {steps: 3}\nrate: true\n", 2, "rate is a number, not True", None),
        ("inner:\n  steps: 2.5\n", 2, "inner.steps is an integer, not 2.5", None),
        ("inner:\n  steps: 0.5M5\n", 2, "inner.steps is an integer, not '0.5M5'", None),
        ("inner:\n  steps: yes\n", 2, "inner.steps is an integer, not 'yes'", None),
        ("inner: {steps: 3}\nflag: 1\n", 2, "flag is true or false, not 1", None),
        ("inner: {steps: 3}\nlabel: 3\n", 2, "label is text, not 3", None),
        ("inner: {steps: 3}\nlimit: x\n", 2, "limit is an integer, not 'x'", None),
        ("inner:\n  steps: 3\n  color: rde\n", 3, "inner.color is one of", "did you mean 'red'?"),
        ("inner: {steps: 3}\nverify: of\n", 2, "verify is one of lazy, off", "mean 'off'?"),
        ("inner: {steps: 3}\noptim: {name: loin}\n", 2, "no kind called 'loin'", "mean 'lion'?"),
        ("inner: {steps: 3}\noptim: {name: lion, betas: [1, 2]}\n", 2, "optim.betas", "lr, name"),
        ("inner: {steps: 3}\noptim: {betas: [1]}\n", 2, "optim.betas has 2 values, not 1", None),
        ("inner: {steps: 3}\nskip:\n- [1, x]\n", 3, "skip[0][1] is an integer", None),
        ("inner:\n  steps: 0\n", 2, "inner.steps is at least 1, not 0", None),
        ("inner:\n  steps: 13\n  color: blue\n", 3, "13 steps are not blue", "write red"),
        ("inner: {steps: 3}\nshare: x\n", 2, "'x' is not a share", "write 1/3"),
        ("inner: {steps: 3}\nrates:\n  a: 1\n  b: 2\n", 4, "rates.b is above 0", None),
        ("inner: {steps: 3}\nrates:\n  a: 1\n  B: 1\n", 4, "rates.B is a word of small", None),
        ("inner: {steps: 3}\nsizes: []\n", 2, "sizes is empty", None),
        ("inner: {steps: 3}\noptim: {name: 3}\n", 2, "optim.name is one of adam, lion", None),
        ("inner: {steps: 3}\nskip: 3\n", 2, "skip is a list", None),
        ("inner: 3\n", 1, "inner is a mapping with steps, color, not 3", None),
        ("rate: 1\n", 1, "inner is missing", "--inner=..."),
        ("inner:\n  color: red\n", 1, "inner.steps is missing", "an integer"),
    ],
)
def test_mistake_in_the_file_is_named_with_its_line(
    tmp_path: Path, text: str, line: int, says: str, fix: str | None
) -> None:
    error = refusal(tmp_path, text)
    assert says in error.what
    assert error.where == f"{tmp_path / 'c.yaml'}:{line}"
    assert (fix is None) or (fix in (error.fix or ""))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("--inner.stesp=3", "unknown field inner.stesp"),
        ("--rate=fast", "rate is a number"),
        ("--rate.x=1", "rate is a value, it has no fields"),
        ("--rate", "cannot read the option"),
        ("--=1", "cannot read the option"),
        ("--a..b=1", "cannot read the option"),
        ("--inner={steps: 0}", "steps is at least 1"),
    ],
)
def test_mistake_in_an_option_is_named_with_the_option(
    tmp_path: Path, override: str, says: str
) -> None:
    error = refusal(tmp_path, "rate: 1\ninner: {steps: 3}\n", override)
    assert says in error.what
    assert override.split("=")[0] in (error.where or error.what)


def test_python_code_meets_the_same_checks() -> None:
    with pytest.raises(UsageError, match="steps is at least 1, not 0") as caught:
        Inner(steps=0)
    assert caught.value.where == "Inner"
    with pytest.raises(UsageError, match="color is one of red, blue"):
        Inner(steps=1, color="green")  # type: ignore[arg-type]


def test_a_written_form_is_read_by_its_reader(tmp_path: Path) -> None:
    assert from_text(tmp_path, MINIMAL + "share: 1/3\n").share == Fraction(1, 3)


def test_paths_in_the_file_count_from_its_folder_and_options_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    text = MINIMAL + "files: {a: x/y, b: /z, c: 's3://bucket/d'}\n"
    assert from_text(tmp_path, text).files == {
        "a": str(tmp_path / "x/y"),
        "b": "/z",
        "c": "s3://bucket/d",
    }
    assert from_text(tmp_path, text, "--files.a=x").files["a"] == str(tmp_path / "here/x")


def test_missing_file_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the configuration") as caught:
        Values.read(tmp_path / "none.yaml")
    assert "train.yaml" in (caught.value.fix or "")


configs = st.builds(
    Outer,
    inner=st.builds(Inner, steps=st.integers(14, 2**40), color=st.sampled_from(Color)),
    rate=st.floats(allow_nan=False, allow_infinity=False),
    flag=st.booleans(),
    label=st.text(st.characters(codec="ascii")),
    limit=st.none() | st.integers(-5, 5),
    optim=st.builds(Adam, lr=st.floats(0, 1)) | st.builds(Lion, lr=st.floats(0, 1)),
    skip=st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=3),
)


@given(configs)
def test_a_saved_config_reads_back_as_itself(config: Outer) -> None:
    assert parse(Outer, Values(as_dict(config))) == config


def test_differences_name_the_fields() -> None:
    old = {"a": 1, "b": {"c": [1], "d": 2}, "gone": 3}
    new = {"a": 1, "b": {"c": [2], "d": 2}, "new": "x"}
    assert differences(old, new) == ["b.c: [1] -> [2]", "gone: 3 -> None", "new: None -> 'x'"]
    assert differences(old, old) == []


@dataclass(frozen=True, kw_only=True)
class Node:
    value: Annotated[int, Meta(ge=0)] = 0
    below: list[Node] = field(default_factory=list)
    named: dict[str, Node] = field(default_factory=dict)


trees = st.recursive(
    st.builds(dict, value=st.integers(0, 9)),
    lambda inner: st.builds(
        dict,
        value=st.integers(0, 9),
        below=st.lists(inner, max_size=3),
        named=st.dictionaries(st.sampled_from(["a", "b c", "1", "x.y"]), inner, max_size=3),
    ),
    max_leaves=8,
)


def values_in(tree: dict[str, Any], path: KeyPath = ()) -> list[KeyPath]:
    """The path of each `value` of a tree."""
    found: list[KeyPath] = [(*path, "value")]
    for number, item in enumerate(tree.get("below", [])):
        found += values_in(item, (*path, "below", number))
    for name, item in tree.get("named", {}).items():
        found += values_in(item, (*path, "named", name))
    return found


def written(node: Any, indent: str = "") -> list[str]:
    """YAML with each mapping key and list item on a line of its own."""
    lines = []
    pairs = node.items() if isinstance(node, dict) else ((None, item) for item in node)
    for key, item in pairs:
        head = f"{indent}- " if key is None else f"{indent}{json.dumps(key)}: "
        if isinstance(item, (dict, list)) and item:
            lines += [head.rstrip(), *written(item, indent + "  ")]
        else:
            lines.append(head + json.dumps(item))
    return lines


@given(trees, st.data(), st.sampled_from([-1, "x", None, [1]]))
def test_a_wrong_value_anywhere_is_named_with_its_path_and_line(
    tree: dict[str, Any], data: st.DataObject, wrong: Any
) -> None:
    path = data.draw(st.sampled_from(values_in(tree)))
    place: Any = tree
    for part in path[:-1]:
        place = place[part]
    place["value"] = wrong
    lines = written(tree)
    document = strict_yaml.load("\n".join(lines), "t.yaml", numbers="float")
    assert document.value == tree
    values = Values(document.value, file="t.yaml", lines=document.lines)
    with pytest.raises(UsageError) as caught:
        parse(Node, values)
    assert caught.value.what.startswith(f"{dotted(path)} is ")
    line = int((caught.value.where or "").removeprefix("t.yaml:"))
    assert lines[line - 1].lstrip(" -").startswith('"value":')
    assert path in [at for at, key_line in document.lines.items() if key_line == line]
    values.override(f"--{dotted(path)}=5")
    assert parse(Node, values)
