"""--where: what is read of an expression, and the same answer whatever holds the values."""

from __future__ import annotations

import ast
import math
import operator
import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from olm_data.errors import InputError, UsageError
from olm_data.select.evaluate import check_types, matches, matching_groups
from olm_data.select.where import MOST_CHARACTERS, Node, columns, parse

# --- a reference: one value at a time, written from the documented rules ------------------------
OPS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
Expr = tuple[Any, ...]


def kind(value: Any) -> str:
    return "bool" if isinstance(value, bool) else "str" if isinstance(value, str) else "number"


def reference(expr: Expr, row: dict[str, Any]) -> bool | None:
    """Evaluate by SQL's rules; None is unknown."""
    match expr:
        case ("not", part):
            value = reference(part, row)
            return None if value is None else not value
        case ("and" | "or" as word, left, right):
            sides = {reference(left, row), reference(right, row)}
            decisive = word == "or"
            return decisive if decisive in sides else None if None in sides else not decisive
        case ("null", name):
            return row.get(name) is None
        case ("flag", name):
            return row.get(name) if isinstance(row.get(name), bool) else None
        case ("in", name, values):
            value = row.get(name)
            same = [one for one in values if value is not None and kind(one) == kind(value)]
            if value is None or (values and not same):
                return None
            return any(value == one for one in same)
        case (op, name, literal):
            value = row.get(name)
            if value is None or kind(value) != kind(literal):
                return None
            return OPS[op](value, literal)
    raise AssertionError(expr)


def spell(expr: Expr) -> str:
    match expr:
        case ("not", part):
            return f"not ({spell(part)})"
        case ("and" | "or" as word, left, right):
            return f"({spell(left)}) {word} ({spell(right)})"
        case ("null", name):
            return f"`{name}` is None"
        case ("flag", name):
            return f"`{name}`"
        case ("in", name, values):
            return f"`{name}` in [{', '.join(map(repr, values))}]"
        case (op, name, literal):
            return f"`{name}` {op} {literal!r}"
    raise AssertionError(expr)


# --- strategies --------------------------------------------------------------------------------
INTS = st.sampled_from([-(2**63), -3, 0, 1, 2, 3, 2**53, 2**53 + 1, 2**63 - 1]) | st.integers(-4, 4)
FLOATS = st.sampled_from([-0.0, 0.5, 2.0, 2.5, 2.0**53, 1e300, -1e300, math.inf]) | st.floats(-4, 4)
STRINGS = st.sampled_from(["", "a", "b", "en", "it's", '"', "`", "\n", "\u00e9", "\U0001f600"])
TYPES = {"i": INTS, "f": FLOATS, "s": STRINGS, "b": st.booleans(), "odd name": INTS}
ARROW = {"i": pa.int64(), "f": pa.float64(), "s": pa.string(), "b": pa.bool_()}
ARROW["odd name"] = pa.int32()
SMALL = TYPES | {"odd name": st.integers(-3, 3)}
NUMBERS = INTS | FLOATS.filter(math.isfinite) | st.sampled_from([2**63, -(2**70), 10**400])
LITERALS = {"i": NUMBERS, "f": NUMBERS, "s": STRINGS, "odd name": NUMBERS}
ROWS = st.lists(st.fixed_dictionaries({n: st.none() | v for n, v in SMALL.items()}), max_size=8)
WITH_NAN = st.lists(
    st.fixed_dictionaries({"f": st.none() | FLOATS | st.just(math.nan), "s": st.none() | STRINGS}),
    max_size=8,
)


@st.composite
def leaf(draw: st.DrawFn) -> Expr:
    name = draw(st.sampled_from([*SMALL, "gone"]))
    shape = draw(st.sampled_from(["null", "compare", "compare", "compare", "in"]))
    if shape == "null":
        return ("null", name)
    if name == "b":
        if draw(st.booleans()):
            return ("flag", name)
        return (draw(st.sampled_from(["==", "!="])), name, draw(st.booleans()))
    values = LITERALS.get(name, INTS)
    if shape == "in":
        return ("in", name, tuple(draw(st.lists(values, max_size=3))))
    return (draw(st.sampled_from(list(OPS))), name, draw(values))


EXPRESSIONS = st.recursive(
    leaf(),
    lambda part: (
        st.tuples(st.just("not"), part) | st.tuples(st.sampled_from(["and", "or"]), part, part)
    ),
    max_leaves=6,
)


# --- one meaning -------------------------------------------------------------------------------
@settings(max_examples=120)
@given(EXPRESSIONS, ROWS)
@example(("<", "i", 2.0**53), [dict.fromkeys(SMALL) | {"i": 2**53 + 1}])
@example((">", "f", 2**53 + 1), [dict.fromkeys(SMALL) | {"f": 2.0**53}])
@example(("in", "f", (0,)), [dict.fromkeys(SMALL) | {"f": -0.0}])
@example(("not", ("==", "s", "en")), [dict.fromkeys(SMALL)])
def test_tables_and_json_values_match_as_the_reference_says(
    expr: Expr, rows: list[dict[str, Any]]
) -> None:
    node = parse(spell(expr))
    expected = [reference(expr, row) is True for row in rows]
    lists = {name: [row[name] for row in rows] for name in SMALL}
    assert matches(node, lists, len(rows)).tolist() == expected
    arrays = {name: pa.array(values, ARROW[name]) for name, values in lists.items()}
    assert matches(node, arrays, len(rows)).tolist() == expected


@settings(max_examples=80)
@given(EXPRESSIONS, ROWS, WITH_NAN)
def test_a_row_group_is_only_passed_over_if_no_row_of_it_matches(
    expr: Expr, rows: list[dict[str, Any]], more: list[dict[str, Any]]
) -> None:
    node = parse(spell(expr))
    for table in (
        pa.table({n: pa.array([row[n] for row in rows], ARROW[n]) for n in SMALL}),
        pa.table({n: pa.array([row[n] for row in more], ARROW[n]) for n in ("f", "s")}),
    ):
        if not len(table):
            continue
        columns = {name: table[name].combine_chunks() for name in table.column_names}
        if matches(node, columns, table.num_rows).any():
            assert groups_left(node, table) == {0}


FEW = st.sampled_from([0.0, -0.0, 1.0, 2.5, math.inf, -math.inf, math.nan])

FLOAT_COLUMNS = st.fixed_dictionaries(
    {
        # runs of one number are row groups whose numbers are all equal
        "f": st.lists(st.one_of(st.none(), FEW, st.just(1.0), st.just(1.0)), min_size=6, max_size=6)
        | FEW.map(lambda value: [value, math.nan, value] * 2),
        "g": st.lists(
            st.none() | st.sampled_from([1.0, math.nan, math.nan]), min_size=6, max_size=6
        ),
        "s": st.lists(st.none() | st.sampled_from(["a", "b"]), min_size=6, max_size=6),
    }
)

FLOAT_LEAVES = st.one_of(
    st.tuples(
        st.sampled_from(list(OPS)), st.sampled_from("fg"), st.sampled_from([0, -0.0, 1, 2.5, 0.1])
    ),
    st.tuples(
        st.just("in"),
        st.sampled_from("fg"),
        st.lists(st.sampled_from([0, 1, 2.5]), max_size=2).map(tuple),
    ),
    st.tuples(st.just("null"), st.sampled_from("fgs")),
    st.tuples(st.sampled_from(["==", "!="]), st.just("s"), st.just("a")),
)

FLOAT_EXPRESSIONS = st.recursive(
    FLOAT_LEAVES,
    lambda part: (
        st.tuples(st.just("not"), part) | st.tuples(st.sampled_from(["and", "or"]), part, part)
    ),
    max_leaves=4,
)


@settings(max_examples=150)
@given(
    FLOAT_EXPRESSIONS,
    FLOAT_COLUMNS,
    st.sampled_from([pa.float16(), pa.float32(), pa.float64()]),
    st.sampled_from([True, False, ["f"], ["g", "s"]]),
    st.integers(1, 6),
)
@example(
    ("!=", "f", 1),
    {"f": [1.0, math.nan] * 3, "g": [None] * 6, "s": [None] * 6},
    pa.float64(),
    True,
    2,
)
@example(
    ("not", ("in", "f", (1,))),
    {"f": [1.0, math.nan] * 3, "g": [1.0] * 6, "s": ["a"] * 6},
    pa.float64(),
    True,
    2,
)
@example(
    ("not", ("and", (">=", "f", 0), ("<", "f", 2.5))),
    {"f": [1.0, math.nan] * 3, "g": [1.0] * 6, "s": ["a"] * 6},
    pa.float64(),
    True,
    2,
)
def test_statistics_pass_over_no_row_that_would_be_taken_without_them(
    expr: Expr,
    columns: dict[str, list[Any]],
    kind: pa.DataType,
    statistics: bool | list[str],
    group: int,
) -> None:
    table = pa.table(
        {n: pa.array(v, pa.string() if n == "s" else kind) for n, v in columns.items()}
    )
    file = BytesIO()
    pq.write_table(table, file, row_group_size=group, write_statistics=statistics)
    read = pq.ParquetFile(file)
    rows = table.to_pylist()
    holds = {k // group for k, row in enumerate(rows) if reference(expr, row) is True}
    left = matching_groups(parse(spell(expr)), read.metadata, read.schema_arrow)
    assert holds <= left, spell(expr)


@pytest.mark.parametrize("low", [math.nan, 1.0])
@pytest.mark.parametrize("high", [math.nan, 2.0])
@pytest.mark.parametrize("text", ["f != 1.5", "f < 9", "f == 1.5", "not f >= 9", "f not in [3]"])
def test_statistics_of_other_writers_that_hold_nan_pass_over_nothing(
    low: float, high: float, text: str
) -> None:
    file = BytesIO()
    pq.write_table(pa.table({"f": [-77.25, 1.5, 88.125]}), file)
    data = file.getvalue()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[start:]
    for written, wanted in ((-77.25, low), (88.125, high)):
        assert struct.pack("<d", written) in footer
        footer = footer.replace(struct.pack("<d", written), struct.pack("<d", wanted))
    read = pq.ParquetFile(BytesIO(data[:start] + footer))
    assert matching_groups(parse(text), read.metadata, read.schema_arrow) == {0}


@pytest.mark.parametrize("zero", ["0.0", "-0.0", "0"])
def test_both_zeros_are_one_number(zero: str) -> None:
    column = {"f": pa.array([0.0, -0.0, 1.0])}
    assert matches(parse(f"f in ({zero},)"), column, 3).tolist() == [True, True, False]
    assert matches(parse(f"f not in ({zero},)"), column, 3).tolist() == [False, False, True]


def groups_left(node: Node, table: pa.Table) -> set[int]:
    file = BytesIO()
    pq.write_table(table, file)
    read = pq.ParquetFile(file)
    return matching_groups(node, read.metadata, read.schema_arrow)


@pytest.mark.parametrize(
    ("text", "skipped"),
    [
        ("i > 9", True),
        ("i > 8", False),
        ("half > 9.3", True),
        ("half < 9", False),
        ("u == 2 and u != 2.5", False),
        ("u < 0 or u == 2.5 or u >= 10", True),
        ("not i <= 9", True),
        ("i in [10, 11]", True),
        ("s == 'z'", True),
        ("s < 'a'", True),
        ("i is None", True),
        ("i >= 0 and s == 'q'", True),
        ("i >= 0 or s == 'q'", False),
        ("gone == 1", True),
        ("gone is None", False),
    ],
)
def test_statistics_spare_what_cannot_match(text: str, skipped: bool) -> None:
    table = pa.table({"i": list(range(10)), "s": list("abcdefghij")})
    table = table.append_column("half", table["i"].cast(pa.float32()))
    table = table.append_column("u", table["i"].cast(pa.uint16()))
    assert groups_left(parse(text), table) == (set() if skipped else {0})


def test_each_row_group_is_judged_by_its_own_statistics() -> None:
    file = BytesIO()
    pq.write_table(pa.table({"i": list(range(10))}), file, row_group_size=3)
    metadata, schema = pq.read_metadata(file), pa.schema([("i", pa.int64()), ("a.b", pa.int64())])
    assert matching_groups(parse("i in [4, 9]"), metadata, schema) == {1, 3}
    assert matching_groups(parse("`a.b` == 1"), metadata, schema) == {0, 1, 2, 3}
    assert matching_groups(parse("`a.b` == 1 and i < 3"), metadata, schema) == {0}


@given(EXPRESSIONS)
def test_the_spelled_out_expression_means_the_same(expr: Expr) -> None:
    node = parse(spell(expr))
    assert parse(str(node)) == node


@given(
    st.lists(st.none() | INTS | FLOATS | STRINGS | st.booleans() | st.just([1]), max_size=8),
    st.sampled_from(["x == 1", "x != 'a'", "x in [1, 'a', True]", "not x", "x is not None"]),
)
def test_json_values_of_mixed_kinds_are_each_decided_by_their_own(
    values: list[Any], text: str
) -> None:
    meaning: dict[str, Callable[[Any], bool]] = {
        "x == 1": lambda v: kind(v) == "number" and v == 1,
        "x != 'a'": lambda v: kind(v) == "str" and v != "a",
        "x in [1, 'a', True]": lambda v: v is True or (v == 1 if kind(v) == "number" else v == "a"),
        "not x": lambda v: v is False,
        "x is not None": lambda v: True,
    }
    expected = [
        v is not None and (text == "x is not None" or not isinstance(v, list)) and meaning[text](v)
        for v in values
    ]
    assert matches(parse(text), {"x": values}, len(values)).tolist() == expected


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.uint64(), pa.float32(), pa.float16()])
@pytest.mark.parametrize("literal", [-1, 0, 2, 2.5, 300, 2**64, -(2**80), 1e300])
def test_a_literal_outside_a_columns_range_is_compared_as_a_number(
    kind: pa.DataType, literal: Any
) -> None:
    values = [0.0, 2.0, 3.0] if pa.types.is_floating(kind) else [0, 2, 3]
    column = pa.array(values, pa.float32()).cast(kind)
    for op in OPS:
        got = matches(parse(f"x {op} {literal!r}"), {"x": column}, 3)
        assert got.tolist() == [OPS[op](v, literal) for v in values], op


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_text_columns_of_any_type_are_strings(kind: pa.DataType) -> None:
    column = pa.array(["en", None, "de"], pa.string()).cast(kind)
    assert matches(parse("x >= 'e' or x in ['de']"), {"x": column}, 3).tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("text", "type", "fits"),
    [
        ("x > 3", pa.int64(), True),
        ("x > 3", pa.string(), False),
        ("x > 3", pa.bool_(), False),
        ("x == 'a'", pa.float64(), False),
        ("x", pa.int64(), False),
        ("x is None", pa.list_(pa.int64()), True),
        ("x == 1", pa.timestamp("s"), False),
        ("x in ['a', 1]", pa.string(), True),
        ("x == 'a'", pa.null(), True),
    ],
)
def test_a_condition_no_value_of_the_column_can_decide_is_refused(
    text: str, type: pa.DataType, fits: bool
) -> None:
    schema = pa.schema([("x", type)])
    if fits:
        check_types(parse(text), schema, "a.parquet")
        return
    with pytest.raises(InputError) as caught:
        check_types(parse(text), schema, "a.parquet")
    assert str(type) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("0.5 < score <= 3", "score > 0.5 and score <= 3"),
        ("'en' == `language`", 'language == "en"'),
        ("x not in (1, 2)", "not x in [1, 2]"),
        ("x is not null and flag", "not (x is None) and flag"),
        ("flag == true", "flag == True"),
        ("`a b` > -1 and\n `or` == 1", "`a b` > -1 and `or` == 1"),
    ],
)
def test_an_expression_can_be_spelled_in_ways(text: str, same: str) -> None:
    assert parse(text) == parse(same)


def test_the_columns_of_an_expression_are_known() -> None:
    assert columns(parse("`a.b` > 1 and (c or not x in [2]) and c is None")) == ["a.b", "c", "x"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "invalid syntax"),
        ("score = 3", "invalid syntax"),
        ("score > ", "invalid syntax"),
        ("3", "neither a comparison nor a column"),
        ("1 < 2", "neither is a column"),
        ("a < b", "not with another column"),
        ("a == None", "write `x is None`"),
        ("a is 3", "for None only"),
        ("a < True", "have no order"),
        ("'a' in tags", "a list after it"),
        ("a in 'abc'", "a list after it"),
        ("len(a) > 3", "neither is a column"),
        ("__import__('os').system('true')", "neither a comparison nor a column"),
        ("a == 1 + 1", "is not a number"),
        ("a == b''", "is not a number"),
        ("a == 3j", "is not a number"),
        ("a == 1e999", "is not a number"),
        ("a == f'{a}'", "is not a number"),
        ("a == --1", "a sign stands before a number"),
        ("a == '\\ud800'", "surrogate"),
        ("a == '\\d'", "invalid escape"),
        ("a == '''x'''", "single or double quotes"),
        ("(lambda: a)()", "neither a comparison nor a column"),
        ("(a := 3) == 3", "neither is a column"),
        ("a == 1; b == 2", "invalid syntax"),
        ("a == '\0'", "null"),
        ("(" * 300 + "a" + ")" * 300, ""),
        ("not " * 100 + "a", "nested more than"),
        ("not " * 4000 + "a", ""),
        ("a == 1 or " * 900 + "b", "parts"),
        ("a == '" + "x" * MOST_CHARACTERS + "'", "characters"),
        ("a == 1 # and b == 2", "comment"),
        ("_0_ == 1 and `a` == 2", "backticks"),
    ],
)
def test_what_is_not_of_the_language_is_refused_with_a_reason(text: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert why in str(caught.value.why)
    assert "score >= 3" in str(caught.value.fix)


@settings(max_examples=300)
@example("A.``")
@given(st.text(max_size=40) | st.text("ab01<>=!()[],'\"` \nnotinadrs.\\", max_size=40))
def test_any_text_is_an_expression_or_a_usage_error(text: str) -> None:
    try:
        node = parse(text)
    except UsageError:
        return
    assert parse(str(node)) == node


def test_a_file_that_is_closed_late_while_a_condition_is_read_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    parsed = ast.parse

    def and_let_go(text: str, mode: str) -> ast.AST:
        held: Any = [open(tmp_path / "file", "rb")]  # noqa: SIM115
        del held
        return parsed(text, mode=mode)

    found: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", found.append)
    monkeypatch.setattr(ast, "parse", and_let_go)
    with pytest.warns(ResourceWarning):
        parse("score >= 77123")
    assert not found
