"""Values to typed configurations and back: hints, one wording, schemas."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta
from support.runs import config_values, environment
from support.stand_in import MANIFEST, parse_mixture

from olm_data.config import strict_yaml
from olm_data.config.convert import Config, as_dict, describe, parse
from olm_data.config.docs import attributes
from olm_data.config.hints import Count, FilePath, OneOf, ReadBy, bounds
from olm_data.config.schema import check_names
from olm_data.config.values import KeyPath, Values, differences, dotted
from olm_data.errors import UsageError, suggest
from olm_train.run.command import SCHEMA
from olm_train.run.config import RunConfig


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


@dataclass(frozen=True, kw_only=True)
class Base:
    """A base.

    Attributes:
        rate: from the base,
            on two lines.
        one, two: both.
    """

    name: Literal["base"] = "base"
    rate: float = 1.0
    one: int = 1
    two: int = 2


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    """One that says more.

    Attributes:
        one: its own.

    Raises:
        Nothing: ever.
    """

    extra: list[int] = field(default_factory=list)


def test_attributes_are_those_of_a_class_over_those_of_its_bases() -> None:
    both = {"rate": "from the base, on two lines.", "two": "both."}
    assert attributes(Base) == {**both, "one": "both."}
    assert attributes(Derived) == {**both, "one": "its own."}


@pytest.mark.parametrize(
    ("hint", "says"),
    [
        (int, "an integer"),
        (float | None, "a number or null"),
        (FilePath, "a path"),
        (Color, "one of red, blue"),
        (Literal["a", "b"] | bool, "one of a, b or true or false"),
        (list[str], "a list (text each)"),
        (dict[str, float], "a mapping of names (a number each)"),
        (Base, "a mapping with name, rate, one, two"),
        (Annotated[int, Meta(ge=1)], "an integer"),
        (bool | Annotated[int, Meta(ge=2)], "true or false or an integer (at least 2)"),
        (Annotated[str, OneOf(lambda: ["a", "b"])], "one of a, b"),
        (Count | None, "a count or null"),
    ],
)
def test_a_type_is_described_in_words(hint: Any, says: str) -> None:
    assert describe(hint) == says


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        (Meta(ge=1), "at least 1"),
        (Meta(gt=0, le=10_000_000), "above 0 and at most 10,000,000"),
        (Meta(ge=0.5, lt=1.0), "at least 0.5 and below 1"),
        (Meta(min_length=1), "not empty"),
        (Meta(pattern="^a", description="a word that begins with a"), "a word that begins with a"),
    ],
)
def test_a_constraint_is_told_in_words(meta: Meta, says: str) -> None:
    assert bounds(meta) == says


TRAIN = """\
model: {d_model: 16, n_layers: 2, n_heads: 2, vocab_size: 64}
data_loader:
  mixture: mix.lock.json
  global_batch_size: 64
train_module:
  rank_microbatch_size: 64
  dp_config: {name: fsdp}
trainer: {save_folder: run}
"""


def of_mixture(old: str, new: str) -> list[str]:
    assert old in MANIFEST
    with pytest.raises(UsageError) as error:
        parse_mixture(MANIFEST.replace(old, new))
    return str(error.value).splitlines()


def of_training(folder: Path, old: str, new: str) -> list[str]:
    assert old in TRAIN
    file = folder / "train.yaml"
    file.write_text(TRAIN.replace(old, new))
    with pytest.raises(UsageError) as error:
        parse(RunConfig, Values.read(file))
    return str(error.value).replace(f"{folder}/", "").splitlines()


WORDED = {
    "an unknown field": (
        ("max_epochs: 4", "max_epoch: 4"),
        ["unknown field sources.web.max_epoch", "manifest.yaml:6", "did you mean 'max_epochs'?"],
        ("n_heads", "n_head"),
        ["unknown field model.n_head", "train.yaml:1", "did you mean 'n_heads'?"],
    ),
    "a value of another type": (
        ("sequence_length: 2048", "sequence_length: '2048'"),
        [
            "sequence_length is an integer, not '2048'",
            *("manifest.yaml:3", "write `sequence_length: 2048`"),
        ],
        ("global_batch_size: 64", "global_batch_size: many"),
        ["data_loader.global_batch_size is an integer, not 'many'", "train.yaml:4"],
    ),
    "a value of another type in a mapping": (
        ("weights: {web: 85, code: 15}", "weights: {web: many, code: 15}"),
        ["stages[0].weights.web is a number, not 'many'", "manifest.yaml:9"],
        ("{name: fsdp}", "{name: ddp, cpu_offload: true}"),  # fields that do not go together
        [
            "train_module.dp_config.cpu_offload: has no effect with name: ddp",
            *("train.yaml:7", "leave it out, or change the other one"),
        ],
    ),
    "a value out of range": (
        ("max_epochs: 4", "max_epochs: 0"),
        ["sources.web.max_epochs is above 0, not 0", "manifest.yaml:6"],
        ("{name: fsdp}", "{name: fsdp, prefetch_factor: -1}"),
        ["train_module.dp_config.prefetch_factor is at least 0, not -1", "train.yaml:7"],
    ),
    "a name that is none of the choices": (
        ("packing: concat", "packing: concta"),
        [
            "packing is one of concat, best_fit, document, not 'concta'",
            *("manifest.yaml:4", "did you mean 'concat'?"),
        ],
        ("{name: fsdp}", "{name: fdsp}"),
        [
            "train_module.dp_config.name is one of fsdp, hsdp, ddp, not 'fdsp'",
            *("train.yaml:7", "did you mean 'fsdp'?"),
        ],
    ),
    "a field that is missing": (
        ("sequence_length: 2048\n", ""),
        ["sequence_length is missing", "manifest.yaml:1", "write `sequence_length: 2048`"],
        ("  global_batch_size: 64\n", ""),
        [
            *("data_loader.global_batch_size is missing", "train.yaml:2"),
            "add `global_batch_size: ...` (an integer), or --data_loader.global_batch_size=... "
            "on the command line",
        ],
    ),
}
"""A change of a manifest and what is said of it, and the same of a training configuration."""


@pytest.mark.parametrize("what", WORDED)
def test_a_mistake_is_worded_alike_in_every_configuration(what: str, tmp_path: Path) -> None:
    of_manifest, said, of_train, said_too = WORDED[what]
    for words, found in (
        (said, of_mixture(*of_manifest)),
        (said_too, of_training(tmp_path, *of_train)),
    ):
        labels = ("", "  where: ", "  fix: ")
        assert found == [label + text for label, text in zip(labels, words, strict=False)]


WRITTEN = json.loads(SCHEMA.read_bytes())

MISTAKES = [
    "--sede=1",
    "--model.n_layer=2",
    "--train_module.optim.lrr=1",
    "--train_module.optim={name: adamW}",
    "--train_module.optim={name: muon, no_such: 1}",
    "--train_module.scheduler={name: cosine}",
    "--train_module.scheduler={name: wsd, warm_up: 3}",
    "--trainer.callbacks.chekpointer={}",
    "--trainer.callbacks.lm_evaluator.eval_intervall=3",
    "--trainer.max_duration.units=steps",
    "--trainer.callbacks.batch_size_scheduler.schedule=[{valeu: 3}]",
    "--train_module.dp_config={nam: fsdp}",
]


def values(lock: Path, folder: Path, *options: str) -> Values:
    found = Values(config_values(lock, folder), folder=folder)
    for option in options:
        found.override(option)
    return found


@pytest.mark.parametrize("option", MISTAKES)
def test_a_misspelt_name_is_found_as_the_types_find_it(
    option: str, tiny_mixture: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as early:
        check_names(WRITTEN, values(tiny_mixture, tmp_path, option))
    with pytest.raises(UsageError) as late:
        RunConfig.resolve(values(tiny_mixture, tmp_path, option))
    assert str(early.value) == str(late.value)
    assert early.value.fix


@pytest.mark.parametrize(
    "option",
    [
        "--model={preset: olmo2-1b}",
        "--model={depth: 4, attention: {qk_norm: head}}",
        "--train_module.scheduler=null",
        "--train_module.optim=muon",
        "--model.norm=layer_norm",
        "--trainer.callbacks.speed_monitor=null",
        '--trainer.callbacks.lm_evaluator.datasets["any name"]=x',
    ],
)
def test_what_the_types_take_passes(option: str, tiny_mixture: Path, tmp_path: Path) -> None:
    check_names(WRITTEN, values(tiny_mixture, tmp_path, option))


def test_a_resolved_configuration_passes(tiny_mixture: Path, tmp_path: Path) -> None:
    plain: dict[str, Any] = as_dict(RunConfig.resolve(values(tiny_mixture, tmp_path)))
    check_names(WRITTEN, Values(plain))


def test_a_typo_is_answered_without_torch(tiny_mixture: Path, tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(json.dumps(config_values(tiny_mixture, tmp_path / "run")))
    script = (
        "import sys; from olm_train.run.command import main; code = main(sys.argv[1:]); "
        "print('torch' in sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(config), "--trainer.sav_folder", "x"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 2
    assert "did you mean 'save_folder'?" in done.stderr
    assert done.stdout.strip() == "False"


def test_the_same_name_in_other_letters_is_the_nearest() -> None:
    assert suggest("adamW", ["adam", "adamw", "lion"]) == "did you mean 'adamw'?"
    assert suggest("ADAM", ["adam", "adamw"]) == "did you mean 'adam'?"
