"""The manifest: every key is read exactly, or refused with its line."""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from support.command import Olm
from support.stand_in import MANIFEST, parse_mixture, stand_in_dataset

from olm_data.errors import InputError, UsageError
from olm_data.mixture.manifest import SCHEMA as PATH
from olm_data.mixture.mix import MixPlan
from olm_data.mixture.stage_spec import capacity, expand, fill, leaves, members, water_fill
from olm_data.order.slots import exact_parts, round_amounts
from olm_data.packing.concat import Concat


def test_a_manifest_is_read_into_exact_values() -> None:
    mixture = parse_mixture(MANIFEST)
    assert (mixture.seed, mixture.sequence_length) == (20260101, 2048)
    assert [(s.name, s.data, s.max_epochs) for s in mixture.sources] == [
        ("code", "s3://bucket/tokens/code", Fraction(5, 2)),
        ("web", "./tokens/web", Fraction(4)),
    ]
    assert [(s.name, s.tokens, dict(s.shares)) for s in mixture.stages] == [
        ("main", 95_000_000, {"web": Fraction(17, 20), "code": Fraction(3, 20)}),
        ("anneal", 5_000_000, {"web": Fraction(2, 5), "code": Fraction(3, 5)}),
    ]


def test_what_may_be_left_out_has_the_documented_default() -> None:
    mixture = parse_mixture(
        "{version: 1, sequence_length: 8, sources: {a: {data: x}}, "
        "stages: [{name: m, tokens: 8, weights: {a: 1}}]}"
    )
    assert (mixture.seed, mixture.packing, mixture.on_exhausted) == (0, Concat(), "error")
    assert mixture.sources[0].max_epochs == 4


@pytest.mark.parametrize(
    ("text", "count"),
    [
        *[("1.5B", 1_500_000_000), ("2_000_000", 2_000_000), ("1_000K", 1_000_000)],
        *[("1e3", 1000), ("0.1K", 100), ("'12'", 12)],
    ],
)
def test_token_counts_are_exact(text: str, count: int) -> None:
    stages = parse_mixture(MANIFEST.replace("tokens: 95M", f"tokens: {text}")).stages
    assert stages[0].tokens == count


@pytest.mark.parametrize("text", ["4.611686018427387904T", "1.5", "0", "-5", "5G", "true", "[1]"])
def test_counts_that_are_not_whole_or_not_counts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a whole number") as error:
        parse_mixture(MANIFEST.replace("tokens: 95M", f"tokens: {text}"))
    assert error.value.where == "manifest.yaml:9"


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("version: 1", "version: 2", 1, "version is 1, not 2"),
        ("seed: 20260101", "sed: 1", 2, "did you mean 'seed'"),
        ("seed: 20260101", "seed: -1", 2, "seed is at least 0"),
        ("seed: 20260101", "seed: 1.5", 2, "seed is an integer, not 1.5"),
        ("sequence_length: 2048", "sequence_length: 0", 3, "sequence_length is at least 1"),
        ("sequence_length: 2048", "sequence_length: '8'", 3, "an integer, not '8'"),
        ("sequence_length: 2048\n", "", 1, "sequence_length is missing"),
        ("packing: concat", "packing: bestfit", 4, "best_fit"),
        ("on_exhausted: error", "on_exhausted: stop", 11, "one of error, cap"),
        ("max_epochs: 4", "max_epoch: 4", 6, "did you mean 'max_epochs'"),
        ("max_epochs: 4", "max_epochs: 0", 6, "above 0"),
        ("max_epochs: 4", "max_epochs: many", 6, "a number, not 'many'"),
        ("data: ./tokens/web", "data: 5", 6, "not a path"),
        ("data: ./tokens/web", 'data: "a\\tb"', 6, "not a path"),
        ("{data: ./tokens/web, max_epochs: 4}", "{}", 6, "data is missing"),
        ("{data: ./tokens/web, max_epochs: 4}", "{max_epochs: 4}", 6, "data is missing"),
        ("  web:  {", "  we b: {", 6, "not a source name"),
        ("s3://bucket", "s3://user:hunter2@bucket", 7, "user, password or query"),
        ("tokens/code", "code?X-Amz-Signature=hunter2", 7, "user, password or query"),
        ("web: 85, code: 15", "web: 85, cod: 15", 9, "did you mean 'code'"),
        ("web: 85, code: 15", "web: 0, code: 0", 9, "sum to 0"),
        ("web: 85, code: 15", "web: 85, code: -1", 9, "weights.code is at least 0, not -1"),
        ("web: 85, code: 15", "web: 85, code: .nan", 9, "not a finite number"),
        ("weights: {web: 85, code: 15}", "weights: 5", 9, "is a mapping of names"),
        ("weights: {web: 85, code: 15}", "epochs: {web: 1}", 9, "epochs and tokens"),
        ("tokens: 95M, ", "", 9, "add its length"),
        (", weights: {web: 85, code: 15}", "", 9, "it has none"),
        ("tokens: 5M,  tokens_from", "weights: {web: 1}, tokens_from", 10, "it has weights"),
        ("tokens: 5M,", "tokens: 6M,", 10, "sums to 5,000,000"),
        ("name: anneal", "name: main", 10, "two stages are named 'main'"),
        ("name: anneal", "name: 5", 10, "not a stage name"),
        ("code: 3M}", "code: 0}", 10, "not a whole number"),
    ],
)  # fmt: skip
def test_a_wrong_manifest_is_refused_with_its_line(
    old: str, new: str, line: int, says: str
) -> None:
    assert old in MANIFEST
    with pytest.raises(UsageError) as error:
        parse_mixture(MANIFEST.replace(old, new))
    assert error.value.where == f"manifest.yaml:{line}"
    assert says in str(error.value)
    assert "hunter2" not in str(error.value)


def test_without_stages_the_message_shows_an_example_that_works() -> None:
    head = MANIFEST[: MANIFEST.index("stages:")]
    with pytest.raises(UsageError, match="stages is missing") as error:
        parse_mixture(head)
    example = (error.value.fix or "").removeprefix("write\n")
    assert parse_mixture(head + "\n".join(line[4:] for line in example.splitlines())).stages


@pytest.mark.parametrize(
    ("data", "location"),
    [
        ("./tokens/web", "/home/user/tokens/web"),
        ("../web", "/home/web"),
        ("/data/web", "/data/web"),
        ("file:///data/web", "/data/web"),
        ("s3://bucket/web", "s3://bucket/web"),
    ],
)
def test_data_is_found_from_the_manifests_folder(data: str, location: str) -> None:
    mixture = parse_mixture(MANIFEST.replace("./tokens/web", data), folder="/home/user")
    assert mixture.resolve(mixture.sources[1].data) == location


def test_a_stage_may_have_a_shorter_sequence_length_that_divides_the_longest() -> None:
    def lengths(value: int) -> list[int | None]:
        text = MANIFEST.replace("name: main,", f"name: main, sequence_length: {value},")
        return [stage.sequence_length for stage in parse_mixture(text).stages]

    assert lengths(512) == [512, None]
    assert lengths(2048) == [None, None]
    for wrong, near in ((600, 512), (4096, 2048), (2047, 1024)):
        with pytest.raises(UsageError, match="does not divide the mixture's 2,048") as caught:
            lengths(wrong)
        assert f"write {near:,}" in str(caught.value)
    with pytest.raises(UsageError, match=r"stages\[0\].sequence_length is at least 1"):
        lengths(0)


NUMBERS = """version: 1
seed: 1
sequence_length: 16
packing: concat
sources: {a: {data: ./a, max_epochs: EPOCHS}}
stages: [{name: NAME, tokens: TOKENS, weights: {a: WEIGHT}}]
"""
PLAIN = {"EPOCHS": "1", "NAME": "s", "TOKENS": "64", "WEIGHT": "1"}


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1e3999"])
@pytest.mark.parametrize("field", PLAIN)
def test_numbers_beyond_a_float_in_a_manifest(
    field: str, number: str, tmp_path: Path, olm: Olm
) -> None:
    text = NUMBERS
    for name, value in (PLAIN | {field: number}).items():
        text = text.replace(name, value)
    (tmp_path / "m.yaml").write_text(text)
    said = olm("mix", tmp_path / "m.yaml")
    assert (said.returncode in (2, 4), "Traceback" in said.stderr) == (True, False), said.stderr


# The JSON Schemas that editors use take the examples of this repository, and find mistakes.
TRAIN = Path(__file__).parents[3] / "olm_train/run/train.schema.json"
PIPELINES = Path(__file__).parents[3] / "pipelines"


def mistakes(schema: Path, content: Any) -> list[str]:
    found = Draft202012Validator(json.loads(schema.read_text())).iter_errors(content)
    return [error.message for error in found]


@pytest.mark.parametrize("path", sorted(PIPELINES.glob("*/[mt]*.yaml")), ids=str)
def test_a_pipeline_names_its_schema_which_takes_it(path: Path) -> None:
    schema = PATH if path.name.startswith("mix") else TRAIN
    first = path.read_text().splitlines()[0]
    named = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named).resolve() == schema
    assert mistakes(schema, yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed: 20260101", "sed: 1"),
        ("version: 1", "version: 2"),
        ("sequence_length: 2048", "sequence_length: 0"),
        ("packing: concat", "packing: bestfit"),
        ("max_epochs: 4", "max_epoch: 4"),
        ("  web:  {", "  'we b': {"),
        ("name: main, ", ""),
    ],
)
def test_a_mistake_in_a_manifest_is_found(old: str, new: str) -> None:
    assert mistakes(PATH, yaml.safe_load(MANIFEST)) == []
    assert old in MANIFEST
    assert mistakes(PATH, yaml.safe_load(MANIFEST.replace(old, new)))


@pytest.mark.parametrize("wrong", [{"sede": 1}, {"threads": 0}, {"comm": {"init_timeout": 3}}])
def test_a_mistake_in_a_training_configuration_is_found(wrong: dict[str, Any]) -> None:
    content = yaml.safe_load((PIPELINES / "quickstart/train.yaml").read_text())
    assert mistakes(TRAIN, content | wrong)


HEAD = "version: 1\nseed: 3\nsequence_length: 10\non_exhausted: error\nsources:\n"


def test_weights_from_a_file_are_those_of_the_file_and_its_digest_is_locked(tmp_path: Path) -> None:
    raw = b'{"web": 0.30000000000000004, "code": 7e-1}\n'
    (tmp_path / "weights.json").write_bytes(raw)
    head = HEAD + "  web: {data: ./web}\n  code: {data: ./code}\n"
    text = head + "stages:\n  - {name: a, tokens: 1K, weights_file: weights.json}\n"
    mixture = parse_mixture(text, folder=str(tmp_path))
    opened = {name: stand_in_dataset(name, 10_001) for name in ("web", "code")}
    lock = MixPlan(mixture, opened).compile()
    assert lock.stages[0].weights_file == {
        "name": "weights.json",
        "sha256": hashlib.sha256(raw).hexdigest(),
    }
    share = Fraction("0.30000000000000004")
    assert Fraction(lock.stages[0].wanted[1]) == share / (share + Fraction("0.7"))
    (tmp_path / "weights.json").write_text('{"web": 1,\n "cod": 2}')
    with pytest.raises(UsageError, match="no source 'cod'") as error:
        parse_mixture(text, folder=str(tmp_path))
    assert str(error.value.where).endswith("weights.json:2")
    (tmp_path / "weights.json").unlink()
    with pytest.raises(InputError, match="cannot read the file with the weights") as missing:
        parse_mixture(text, folder=str(tmp_path))
    assert "(from manifest.yaml:9)" in str(missing.value)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ("{code: {web: 1, code: 1}}", "group 'code' contains itself: code > code"),
        ("{code: {hard: 1}, hard: {code: 1}}", "contains itself: hard > code > hard"),
        ("{a: {web: 1}, b: {a: 1, web: 1}}", "source 'web' is reached twice"),
        ("{web: {c: 1}}", "'web' is a source and a group"),
        ("{a: {wep: 1}}", "no source 'wep'"),
        ("{a: {web: 0}}", "sum to 0"),
        ("{a: {}}", "groups.a is empty"),
    ],
)
def test_groups_that_are_no_tree_are_refused_with_their_line(groups: str, says: str) -> None:
    text = HEAD + "  web: {data: ./web}\n  c: {data: ./c}\n"
    with pytest.raises(UsageError) as error:
        parse_mixture(text + f"groups: {groups}\nstages: [{{name: a, epochs: {{web: 1}}}}]\n")
    assert says in str(error.value)
    assert error.value.where == "manifest.yaml:8"


# Promises of groups: shares stay exact, and what one source lacks its nearest neighbours give.
F = Fraction
GROUPS = {"code": {"python": F(3), "rust": F(1)}, "hard": {"code": F(1), "maths": F(1)}}
WEIGHTS = {"web": F(70), "hard": F(30)}


def test_nested_groups_divide_their_share_exactly() -> None:
    tree = expand(WEIGHTS, GROUPS)
    assert leaves(tree) == {
        "web": F(7, 10),
        "python": F(9, 80),
        "rust": F(3, 80),
        "maths": F(3, 20),
    }
    assert members(tree) == {"hard": ("code", "maths"), "code": ("python", "rust")}


def test_what_a_source_lacks_comes_from_its_group_first_and_then_from_the_groups_neighbours() -> (
    None
):
    tree = expand(WEIGHTS, GROUPS)
    plenty = dict.fromkeys(leaves(tree), 10_000)
    short = fill(tree, plenty | {"rust": 5}, F(800))
    assert short == {"web": F(560), "python": F(115), "rust": F(5), "maths": F(120)}
    shorter = fill(tree, plenty | {"rust": 5, "python": 15}, F(800))
    assert shorter == {"web": F(560), "python": F(15), "rust": F(5), "maths": F(220)}
    shortest = fill(tree, plenty | {"rust": 5, "python": 15, "maths": 20}, F(800))
    assert shortest == {"web": F(760), "python": F(15), "rust": F(5), "maths": F(20)}


LIMITED = st.lists(
    st.tuples(st.integers(0, 50).map(F), st.integers(0, 10_000)), min_size=1, max_size=8
).filter(lambda pairs: any(weight for weight, _ in pairs))


@given(LIMITED, st.integers(0, 60).map(lambda sixtieth: F(sixtieth, 60)))
def test_filling_keeps_every_limit_the_total_and_the_ratio_of_those_below_their_limits(
    pairs: list[tuple[Fraction, int]], part: Fraction
) -> None:
    weights, limits = [w for w, _ in pairs], [n for _, n in pairs]
    total = part * sum(n for w, n in pairs if w)
    amounts = water_fill(weights, limits, total)
    assert sum(amounts) == total
    assert all(0 <= a <= n for a, n in zip(amounts, limits, strict=True))
    assert all(not a for a, w in zip(amounts, weights, strict=True) if not w)
    free = [a / w for a, n, w in zip(amounts, limits, weights, strict=True) if w and a < n]
    full = [a / w for a, n, w in zip(amounts, limits, weights, strict=True) if w and a == n]
    assert len(set(free)) <= 1
    assert not free or max(full, default=F(0)) <= free[0]  # the capped have less than their share
    with pytest.raises(ValueError, match="limits sum to less"):
        water_fill(weights, limits, sum(n for w, n in pairs if w) + F(1, 7))


@given(LIMITED, st.integers(0, 60).map(lambda sixtieth: F(sixtieth, 60)))
def test_rounding_amounts_keeps_whole_limits_and_the_total(
    pairs: list[tuple[Fraction, int]], part: Fraction
) -> None:
    total = int(part * sum(n for w, n in pairs if w))
    amounts = water_fill([w for w, _ in pairs], [n for _, n in pairs], F(total))
    rows = round_amounts(amounts, total)
    assert sum(rows) == total
    assert all(r <= n for r, (_, n) in zip(rows, pairs, strict=True))
    assert all(abs(r - a) < 1 for r, a in zip(rows, amounts, strict=True))


@given(st.lists(st.integers(0, 1 << 45), min_size=1, max_size=30))
def test_the_parts_of_a_stage_draw_exactly_its_rows(rows: list[int]) -> None:
    drawn = [0] * len(rows)
    for part, counts in exact_parts(rows):
        assert 0 < sum(counts) <= 1 << 20
        blocks, rest = divmod(part, sum(counts))
        assert not rest
        drawn = [d + blocks * count for d, count in zip(drawn, counts, strict=True)]
    assert drawn == rows


def test_a_share_of_zero_takes_nothing_over() -> None:
    tree = expand({"web": F(1), "off": F(0)}, {})
    assert capacity(tree[1], {"web": 1, "off": 9}) == 0
    assert fill(tree, {"web": 5, "off": 9}, F(5)) == {"web": F(5), "off": F(0)}
