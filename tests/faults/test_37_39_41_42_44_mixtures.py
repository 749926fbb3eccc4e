"""FAULTS rows 37, 39, 41, 42, 44: edited locks, hostile YAML, overlaps, stale sources, weights."""

from __future__ import annotations

import json
import re
import resource
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from support.command import program
from support.forged import forged_lock
from support.remote import TOKENS, remote_mixture
from support.stand_in import MANIFEST, compiled, parse_mixture, stand_in_dataset
from support.store_proxy import Proxy
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.config import strict_yaml
from olm_data.dataset.dataset import Dataset
from olm_data.errors import ConflictError, InputError, UsageError, ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.mixture.lock import UNDIGESTED, Lock
from olm_data.mixture.mix import MixPlan, mix
from olm_data.rows.cache_plan import CacheOptions
from olm_data.rows.reader import RowReader
from olm_data.storage.store import Store


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, (dict, list)):
            yield from leaves(item, (*path, key))
        else:
            yield (*path, key)


def edited(content: Any, path: tuple[Any, ...]) -> Any:
    content = json.loads(json.dumps(content))
    place = content
    for key in path[:-1]:
        place = place[key]
    old = place[path[-1]]
    place[path[-1]] = old + "x" if isinstance(old, str) else (old or 0) + 1
    return content


def test_37_an_edit_of_any_digested_value_is_refused(tmp_path: Path) -> None:
    content = json.loads(compiled(MANIFEST).encode())
    path = tmp_path / "m.lock.json"
    changed = [keys for keys in leaves(content) if keys[0] not in UNDIGESTED] + [("digest",)]
    assert len(changed) > 40
    for keys in changed:
        path.write_text(json.dumps(edited(content, keys)))
        with pytest.raises(ValidationError) as error:
            Lock.read(path)
        assert error.value.exit_code == 3
        assert error.value.where == str(path)


def test_37_added_removed_and_retyped_keys_are_refused(tmp_path: Path) -> None:
    content = json.loads(compiled(MANIFEST).encode())
    path = tmp_path / "m.lock.json"
    without = [{k: v for k, v in content.items() if k != key} for key in content]
    retyped = [content | {"seed": "1"}, content | {"seed": 1.5}, content | {"sources": {}}]
    for broken in [*without, *retyped, content | {"skip": 1}, content | {"folder": "/x"}]:
        path.write_text(json.dumps(broken))
        with pytest.raises(ValidationError):
            Lock.read(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("rows_by_source", [1, 1]), ("counts", [1]), ("block", 7), ("counts", [-3, 23])],
)
def test_37_numbers_that_do_not_fit_are_refused_even_with_a_forged_digest(
    tmp_path: Path, key: str, value: Any
) -> None:
    content = json.loads(compiled(MANIFEST).encode())
    content["stages"][0][key] = value
    path = tmp_path / "m.lock.json"
    path.write_bytes(forged_lock(content))
    with pytest.raises(ValidationError):
        Lock.read(path)


def test_37_every_truncation_is_refused(tmp_path: Path) -> None:
    data = compiled(MANIFEST).encode()
    path = tmp_path / "m.lock.json"
    for length in range(len(data) - 2):  # without its last newline it is still whole
        path.write_bytes(data[:length])
        with pytest.raises(ValidationError):
            Lock.read(path)


def test_37_mix_does_not_replace_an_edited_lock_unasked(tmp_path: Path) -> None:
    lock, path = compiled(MANIFEST), tmp_path / "m.lock.json"
    path.write_text(json.dumps(edited(json.loads(lock.encode()), ("seed",))))
    before = path.read_bytes()
    with pytest.raises(ConflictError):
        lock.write(path)
    assert path.read_bytes() == before
    assert lock.write(path, overwrite=True) == "written"


def test_37_locations_may_be_edited_because_data_moves(tmp_path: Path) -> None:
    content = json.loads(compiled(MANIFEST).encode())
    path = tmp_path / "m.lock.json"
    path.write_text(json.dumps(edited(content, ("locations", "web"))))
    assert Lock.read(path).locations["web"] == "tokens/webx"


BILLION_LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)


HOSTILE = {
    "billion laughs": BILLION_LAUGHS,
    "merge bomb": "a: 1\n<<: {b: 2}\n",
    "deep flow sequence": "[" * 500_000,
    "deep flow mapping": "{a: " * 200_000,
    "deep block": "".join("  " * i + "a:\n" for i in range(900)),
    "huge integer": "a: " + "9" * 1_000_000,
    "huge exponent": "a: 1e999999999",
    "huge mantissa": "a: 0." + "1" * 1_000_000,
    "python object": "a: !!python/object/apply:os.system [touch canary]",
    "duplicate key": "a: 1\n" * 100_000,
    "many documents": "---\na: 1\n" * 100_000,
    "too long": "a: " + "x" * 2**20,
    "not a number": "a: .nan",
    "complex key": "? {a: 1}\n: 1",
    "binary": "\x00" * 1_000_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_39_a_hostile_file_is_refused_with_its_line_after_a_handful_of_events(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events = 0
    parse = yaml.parse

    def counting(*arguments: Any, **options: Any) -> Iterator[Any]:
        nonlocal events
        for event in parse(*arguments, **options):
            events += 1
            yield event

    monkeypatch.setattr(yaml, "parse", counting)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as error:
        strict_yaml.load(HOSTILE[name], "m.yaml")
    assert events < 100
    assert (error.value.where or "").startswith("m.yaml")
    assert len(str(error.value)) < 500
    assert list(tmp_path.iterdir()) == []


def test_39_all_hostile_files_together_are_refused_in_little_memory(tmp_path: Path) -> None:
    for number, text in enumerate(HOSTILE.values()):
        (tmp_path / f"{number}.yaml").write_text(text)
    script = (
        "import sys\n"
        "from olm_data.config.values import Values\n"
        "from olm_data.errors import UsageError\n"
        "from support.memory import peak\n"
        "before = peak()\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        Values.read(path)\n"
        "    except UsageError:\n"
        "        continue\n"
        "    sys.exit(f'{path} was accepted')\n"
        "print((peak() - before) // 1024)\n"
    )
    limit = partial(resource.setrlimit, resource.RLIMIT_CPU, (20, 20))
    done = program("-c", script, *sorted(tmp_path.iterdir()), preexec_fn=limit)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 50  # MB


def test_39_an_unknown_key_is_named_with_its_line_and_the_nearest_known_key() -> None:
    text = "version: 1\nsources:\n  web: {data: web, max_epoch: 2}\n"
    with pytest.raises(UsageError) as error:
        parse_mixture(text, "m.yaml")
    assert str(error.value).splitlines() == [
        "unknown field sources.web.max_epoch",
        "  where: m.yaml:3",
        "  fix: did you mean 'max_epochs'?",
    ]


def hashes(folder: Path) -> set[int]:
    found: set[int] = set()
    for path in folder.glob("*.docs.parquet"):
        found |= set(pq.read_table(path)["content_hash"].to_pylist())
    return found


def test_41_repeated_documents_fall_on_one_side(tiny_tokenizer: Path, tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", texts(100))
    again = write_jsonl(tmp_path / "b.jsonl", texts(150))
    out = tmp_path / "out"
    made = make_dataset([first, again], tiny_tokenizer, out, shard_tokens=700, holdout="1/5")
    assert made.validation is not None
    assert made.manifest.totals.documents + made.validation.totals.documents == 250
    train, held = hashes(out), hashes(out / "validation")
    assert train
    assert held
    assert not train & held
    assert len(train | held) == 150
    assert verify(str(out)).ok  # proves it again, without a join, from the documents' hashes


def test_41_train_of_one_dataset_never_meets_validation_of_another_with_the_same_holdout(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    for name, start in (("x", 0), ("y", 30)):
        source = write_jsonl(tmp_path / f"{name}.jsonl", texts(60, start))
        make_dataset([source], tiny_tokenizer, tmp_path / name, holdout="1/5")
    assert not hashes(tmp_path / "x") & hashes(tmp_path / "y" / "validation")
    assert not hashes(tmp_path / "y") & hashes(tmp_path / "x" / "validation")


YAML = """
version: 1
seed: 1
sequence_length: 16
sources:
  a: {data: ./a}
%s
stages:
  - {name: main, tokens: 512, weights: {a: 1%s}}
"""


def test_42_a_lock_made_after_a_source_was_removed_names_it_nowhere(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    for number, name in enumerate("ab"):
        source = write_jsonl(tmp_path / f"{name}.jsonl", texts(60, 1000 * number))
        make_dataset([source], tiny_tokenizer, tmp_path / name)
    manifest, path = tmp_path / "m.yaml", tmp_path / "m.lock.json"
    removed = Dataset.open(str(tmp_path / "b")).digest
    manifest.write_text(YAML % ("  b: {data: ./b}", ", b: 1"))
    mix(str(manifest), output=str(path))
    assert removed in path.read_text()
    manifest.write_text(YAML % ("", ""))
    with pytest.raises(ConflictError, match="another lock is here"):
        mix(str(manifest), output=str(path))
    mix(str(manifest), output=str(path), overwrite=True)
    assert removed not in path.read_text()
    shutil.rmtree(tmp_path / "b")
    lock = Lock.read(path)
    assert [source.name for source in lock.sources] == ["a"] == list(lock.locations)
    assert [dataset.digest for dataset in lock.open_datasets()] == [
        Dataset.open(str(tmp_path / "a")).digest
    ]


def test_42_a_cached_shard_of_a_dataset_that_was_replaced_is_never_read(
    proxy: Proxy, tmp_path: Path
) -> None:
    url = f"s3://{proxy.server['bucket']}/{tmp_path.name}/a"
    cache, rows = CacheOptions(folder=str(tmp_path / "cache")), np.arange(200)
    locks = remote_mixture(tmp_path, url, seed=1)
    RowReader(locks[0], cache=cache).read(rows)
    Store(url).clear()
    shutil.rmtree(tmp_path / "a")
    remote, local = remote_mixture(tmp_path, url, seed=2)  # the same names, other documents
    reader = RowReader(remote, cache=cache)
    read = reader.read(rows)
    assert np.array_equal(read.tokens, RowReader(local).read(rows).tokens)
    assert reader.remote is not None
    assert reader.remote.fetched_again == 0  # it lies under another key: it is not even opened
    sizes = [int(path.name.split("-")[1]) for path in (tmp_path / "cache").glob("[!.]*-*")]
    assert min(sizes) > 2 * TOKENS


def manifest(stages: str, web: str = "", code: str = "") -> str:
    return (
        "version: 1\nsequence_length: 1000\nsources:\n"
        f"  web: {{data: web{web}}}\n  code: {{data: code{code}}}\nstages:\n{stages}\n"
    )


MAIN = "  - {name: main, tokens: 10M, weights: {web: 3, code: 1}}"


def test_44_a_source_drawn_beyond_its_cap_is_refused_with_the_numbers_and_two_fixes() -> None:
    with pytest.raises(UsageError) as error:
        compiled(manifest(MAIN, code=", max_epochs: 2"), tokens=1_000_001)
    assert error.value.exit_code == 2
    assert error.value.what.splitlines() == [
        "source 'code' is exhausted: the stages draw 2,500 rows (2,500,000 tokens), 2.50 epochs of "
        "its 1,000 rows; max_epochs 2 allows 2,000 rows",
        "source 'web' is exhausted: the stages draw 7,500 rows (7,500,000 tokens), 7.50 epochs of "
        "its 1,000 rows; max_epochs 4 allows 4,000 rows",  # 4 is the default
    ]
    assert error.value.where == "manifest.yaml:5, manifest.yaml:4"
    assert "set max_epochs: 3 for 'code', max_epochs: 8 for 'web'" in str(error.value)
    assert "at most 2,000,000 tokens of 'code', at most 4,000,000 tokens of 'web'" in str(
        error.value
    )


def test_44_each_of_the_two_fixes_really_works() -> None:
    text = manifest(MAIN)
    with pytest.raises(UsageError) as error:
        compiled(text, tokens=1_500_001)
    epochs = re.search(r"max_epochs: (\d+) for 'web'", error.value.fix or "")
    shorter = re.search(r"about ([\d,]+) tokens\)", error.value.fix or "")
    assert epochs
    assert compiled(manifest(MAIN, web=f", max_epochs: {epochs[1]}"), tokens=1_500_001)
    assert shorter
    tokens = int(shorter[1].replace(",", ""))
    assert compiled(text.replace("10M", str(tokens)), tokens=1_500_001)
    assert tokens > 7_990_000  # and gives nothing away


def test_44_caps_count_over_all_stages_and_a_fraction_of_an_epoch_is_legal() -> None:
    two = MAIN + "\n  - {name: end, tokens: 10M, weights: {web: 3, code: 1}}"
    caps = {"web": ", max_epochs: 1.5", "code": ", max_epochs: 0.5"}
    assert compiled(manifest(MAIN, **caps), tokens=10_000_001)
    assert compiled(manifest(two, **caps), tokens=10_000_001)
    with pytest.raises(UsageError, match=r"max_epochs 0\.5 allows 4,999 rows"):
        compiled(manifest(two, **caps), tokens=9_999_001)


def test_44_the_last_allowed_row_is_allowed_and_one_more_is_not() -> None:
    stage = "  - {{name: main, tokens: {}, weights: {{web: 1}}}}"
    assert compiled(manifest(stage.format(4_000_999)), tokens=1_000_001).total_rows == 4000
    with pytest.raises(UsageError, match="4,001 rows"):
        compiled(manifest(stage.format(4_001_000)), tokens=1_000_001)


def test_44_weights_that_sum_to_zero_are_refused() -> None:
    with pytest.raises(UsageError, match="sum to 0") as error:
        parse_mixture(manifest("  - {name: main, tokens: 1M, weights: {web: 0, code: 0.0}}"))
    assert error.value.where == "manifest.yaml:7"


def test_44_a_source_without_one_row_is_refused_with_the_numbers() -> None:
    mixture = parse_mixture(manifest(MAIN))
    opened = {"web": stand_in_dataset("web", 10**7), "code": stand_in_dataset("code", 1000)}
    with pytest.raises(InputError, match="'code' has 1,000 tokens; one row takes 1,001") as error:
        MixPlan(mixture, opened).compile()
    assert "lower sequence_length" in (error.value.fix or "")


def test_44_a_stage_shorter_than_a_row_is_refused() -> None:
    with pytest.raises(UsageError, match="'main' has 999 tokens, less than one row of 1,000"):
        compiled(manifest("  - {name: main, tokens: 999, weights: {web: 1}}"))
