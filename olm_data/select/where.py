"""`--where`: a small expression over the columns of a record, with one meaning in every format.

    "score >= 3 and language == 'en'" -> parse -> nodes -> check_types (a table's schema)
                                                        -> matches     (columns -> bool mask)
                                                        -> can_match   (statistics -> skip a group?)

Values are numbers, strings, booleans or null. A comparison is true, false or, where the value is
null or of another kind than the literal, unknown; `and`, `or`, `not` follow SQL's three-valued
logic, and a record is taken only where the whole is true. Numbers compare exactly, integers and
floats alike; strings by code points. docs/reference/cli.md is the specification. Pure; never:
`eval`, or a column compared with a column.
"""

from __future__ import annotations

import ast
import keyword
import operator
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Annotated, Any, ClassVar, NoReturn

from olm_data.config.hints import ReadBy
from olm_data.errors import UsageError, printable, quoted
from olm_data.storage.names import is_unicode

MOST_CHARACTERS, MOST_NODES, MOST_DEPTH = 16_384, 4_096, 64

Literal = bool | int | float | str

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_SPELLED: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}
_FLIPPED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
# a string | a column in backticks | a line break or comment outside both
_PARTS = re.compile(r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|`([^`]*)`|[\r\n#]""", flags=re.DOTALL)
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_EXAMPLE = "score >= 3 and language in ['en', 'de']"


@dataclass(frozen=True, slots=True)
class Compare:
    """`column op literal`."""

    column: str
    op: str
    value: Literal

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of values that it can be decided for; empty for any."""
        return frozenset({str(kind_of_value(self.value))})

    def __str__(self) -> str:
        return f"{_name(self.column)} {self.op} {self.value!r}"


@dataclass(frozen=True, slots=True)
class In:
    """`column in [literal, ...]`."""

    column: str
    values: tuple[Literal, ...]

    @property
    def kinds(self) -> frozenset[str]:
        """As of `Compare`."""
        return frozenset(str(kind_of_value(value)) for value in self.values)

    def __str__(self) -> str:
        return f"{_name(self.column)} in [{', '.join(map(repr, self.values))}]"


@dataclass(frozen=True, slots=True)
class IsNull:
    """`column is None`: never unknown."""

    column: str
    kinds: ClassVar[frozenset[str]] = frozenset()

    def __str__(self) -> str:
        return f"{_name(self.column)} is None"


@dataclass(frozen=True, slots=True)
class Flag:
    """A column of booleans by itself."""

    column: str
    kinds: ClassVar[frozenset[str]] = frozenset({"bool"})

    def __str__(self) -> str:
        return _name(self.column)


@dataclass(frozen=True, slots=True)
class Not:
    """`not part`."""

    part: Node

    def __str__(self) -> str:
        return f"not ({self.part})"


@dataclass(frozen=True, slots=True)
class Joined:
    """Parts joined by `and`, or with `any` set, by `or`."""

    parts: tuple[Node, ...]
    any: bool

    def __str__(self) -> str:
        return (" or " if self.any else " and ").join(f"({part})" for part in self.parts)


Leaf = Compare | In | IsNull | Flag
Node = Leaf | Not | Joined


def kind_of_value(value: object) -> str | None:
    """Return "bool", "number", "string", None for null, and "other" for all else."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "other"


def leaves(node: Node) -> Iterator[Leaf]:
    """Yield the conditions on single columns."""
    if isinstance(node, Not):
        yield from leaves(node.part)
    elif isinstance(node, Joined):
        for part in node.parts:
            yield from leaves(part)
    else:
        yield node


def columns(node: Node) -> list[str]:
    """Return the names of the columns, in order of appearance."""
    return list(dict.fromkeys(leaf.column for leaf in leaves(node)))


@lru_cache(maxsize=64)
def parse(text: str) -> Node:
    """Return the expression that `text` spells; `str` of it is a text with the same meaning.

    Raises:
        UsageError: it is not of the language, or too large.
    """
    if len(text) > MOST_CHARACTERS:
        raise _refused(text[:40] + "...", f"it has more than {MOST_CHARACTERS:,} characters")
    if '"""' in text or "'''" in text:
        raise _refused(text, "strings stand in single or double quotes")
    quoted: list[str] = []

    def placeholder(found: re.Match[str]) -> str:
        if found[1] is not None:
            return found[0]
        if found[2] is None:
            if found[0] == "#":
                raise _refused(text, "a comment hides the rest of the line")
            return " "
        quoted.append(found[2])
        return f" _{len(quoted) - 1}_ "

    plain = _PARTS.sub(placeholder, text)
    names = {f"_{k}_": name for k, name in enumerate(quoted)}
    if any(re.search(rf"(?<!\w){key}(?!\w)", text) for key in names):
        raise _refused(text, "a column named like _0_ stands in backticks")
    try:
        with warnings.catch_warnings():
            # a doubtful escape or `3is` is an error here; other warnings may come from elsewhere,
            # such as of a file that the garbage collector closes meanwhile
            for kind in (SyntaxWarning, DeprecationWarning):
                warnings.simplefilter("error", kind)
            tree = ast.parse(plain.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        raise _refused(text, printable(said or type(error).__name__)) from error
    if sum(1 for _ in ast.walk(tree)) > MOST_NODES:
        raise _refused(text, f"it has more than {MOST_NODES:,} parts")
    return _Reader(text, names).node(tree, 0)


class _Reader:
    """Turns the whitelisted part of Python's syntax into nodes."""

    def __init__(self, text: str, names: dict[str, str]) -> None:
        self._text, self._names = text, names

    def node(self, tree: ast.expr, depth: int) -> Node:
        if depth > MOST_DEPTH:
            self._refuse(f"it is nested more than {MOST_DEPTH} deep")
        match tree:
            case ast.BoolOp(op=op, values=values):
                parts = tuple(self.node(value, depth + 1) for value in values)
                return Joined(parts, isinstance(op, ast.Or))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Not(self.node(operand, depth + 1))
            case ast.Compare(left=left, ops=ops, comparators=rest):
                sides = [left, *rest]
                pairs = zip(sides[:-1], ops, sides[1:], strict=True)
                parts = tuple(self._compare(*pair) for pair in pairs)
                return parts[0] if len(parts) == 1 else Joined(parts, any=False)
            case ast.Name() | ast.Attribute() if (name := self._column(tree)) is not None:
                return Flag(name)
        return self._refuse(f"{self._spell(tree)} is neither a comparison nor a column")

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Node:
        name, other, flipped = self._column(left), right, False
        if name is None:
            name, other, flipped = self._column(right), left, True
        if name is None:
            self._refuse(f"{self._spell(left)} and {self._spell(right)}: neither is a column")
        if self._column(other) is not None:
            self._refuse("a column is compared with a value, not with another column")
        if isinstance(op, ast.In | ast.NotIn):
            if flipped or not isinstance(other, ast.List | ast.Tuple | ast.Set):
                self._refuse("`in` has a column before it and a list after it: x in ['a', 'b']")
            inside = In(name, tuple(self._literal(item) for item in other.elts))
            return inside if isinstance(op, ast.In) else Not(inside)
        if isinstance(op, ast.Is | ast.IsNot):
            if not self._is_null(other):
                self._refuse("`is` is for None only; write == for values")
            return IsNull(name) if isinstance(op, ast.Is) else Not(IsNull(name))
        value, spelled = self._literal(other), _SPELLED[type(op)]
        if isinstance(value, bool) and spelled not in ("==", "!="):
            self._refuse("True and False have no order; write == or !=")
        return Compare(name, _FLIPPED[spelled] if flipped else spelled, value)

    def _column(self, tree: ast.expr) -> str | None:
        if isinstance(tree, ast.Attribute):  # meta.score
            above = self._column(tree.value)
            return None if above is None else f"{above}.{self._names.get(tree.attr, tree.attr)}"
        if not isinstance(tree, ast.Name) or tree.id in _WORDS:
            return None
        return self._names.get(tree.id, tree.id)

    def _is_null(self, tree: ast.expr) -> bool:
        if isinstance(tree, ast.Name):
            return tree.id == "null"
        return isinstance(tree, ast.Constant) and tree.value is None

    def _literal(self, tree: ast.expr) -> Literal:
        if self._is_null(tree):
            self._refuse("nothing equals None; write `x is None` or `x is not None`")
        sign = 1
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub | ast.UAdd):
            sign = -1 if isinstance(tree.op, ast.USub) else 1
            tree = tree.operand
            if not isinstance(tree, ast.Constant) or kind_of_value(tree.value) != "number":
                self._refuse("a sign stands before a number only")
        if isinstance(tree, ast.Name) and tree.id in _WORDS:
            return bool(_WORDS[tree.id])
        value = tree.value if isinstance(tree, ast.Constant) else None
        match value:
            case bool():
                return value
            case str():
                if not is_unicode(value):
                    self._refuse("a string holds half a surrogate pair, which no text does")
                return value
            case int():
                return sign * value
            case float() if isfinite(value):
                return sign * value
        return self._refuse(f"{self._spell(tree)} is not a number, a string, True or False")

    def _spell(self, tree: ast.expr) -> str:
        text = ast.unparse(tree)
        for key, name in self._names.items():
            text = text.replace(key, f"`{name}`")
        return printable(text[:80])

    def _refuse(self, why: str) -> NoReturn:
        raise _refused(self._text, why)


def _name(column: str) -> str:
    plain = column.isidentifier() and column.isascii() and not keyword.iskeyword(column)
    if plain and column not in _WORDS and not re.fullmatch(r"_\d+_", column):
        return column
    return f"`{column}`"


def _refused(text: str, why: str) -> UsageError:
    return UsageError(
        f"'{printable(text[:80])}' is not a condition over columns",
        why=why,
        fix=f'compare columns with values, joined by and, or, not: "{_EXAMPLE}"; '
        "a column of an odd name stands in `backticks`",
    )


def _read(text: Any) -> Node:
    if not isinstance(text, str):
        raise UsageError(
            f"{quoted(text)} is not a condition",
            fix=f'write one over the kept columns: "{_EXAMPLE}"',
        )
    return parse(text)


Condition = Annotated[Node, ReadBy(_read, "a condition", {"type": "string"})]
"""An expression of a configuration, parsed where it is read."""
