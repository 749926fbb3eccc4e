"""Promises of `olm-data mix` on real datasets: the plan it prints is the run that will happen."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.small_datasets import random_shards, write_dataset
from support.stand_in import MANIFEST, compiled, parse_mixture, stand_in_dataset, stand_ins

from olm_data.cli import cli
from olm_data.errors import OlmError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.mixture.mix import MixPlan


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with two small datasets and a manifest."""
    rng = np.random.default_rng(0)
    write_dataset(tmp_path / "tokens/web", random_shards(rng, [[100] * 50, [37] * 30]))
    write_dataset(tmp_path / "tokens/code", random_shards(rng, [[20] * 100]))
    (tmp_path / "manifest.yaml").write_text(
        "version: 1\nseed: 5\nsequence_length: 16\n"
        "sources:\n  web: {data: tokens/web}\n  code: {data: ./tokens/code, max_epochs: 2}\n"
        "stages:\n  - {name: main, tokens: 8K, weights: {web: 85, code: 15}}\n"
    )
    return tmp_path


def run(*arguments: object) -> tuple[int, str, str]:
    """Run olm-data as its entry point does: (exit code, stdout, stderr with the error message)."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments], standalone_mode=False)
    if isinstance(result.exception, OlmError):
        return result.exception.exit_code, result.stdout, str(result.exception)
    if result.exception is not None:
        raise result.exception
    return 0, result.stdout, result.stderr


def test_the_whole_path_from_manifest_to_opened_datasets(project: Path) -> None:
    code, out, err = run("mix", project / "manifest.yaml")
    assert code == 0
    assert "85.0000%" in out
    assert "written" in err
    assert "next: torchrun" in err
    lock = Lock.read(project / "manifest.lock.json")
    opened = lock.open_datasets()
    assert [d.digest for d in opened] == [s.dataset for s in lock.sources]
    assert lock.sources[0].max_documents_per_row >= 2
    schedule = lock.schedule()
    assert schedule.total_rows == lock.total_rows == 500
    assert np.bincount(schedule.locate(np.arange(500)).source).tolist() == [75, 425]


def test_running_mix_again_says_unchanged(project: Path) -> None:
    run("mix", project / "manifest.yaml")
    before = (project / "manifest.lock.json").stat()
    _, _, err = run("mix", project / "manifest.yaml")
    assert "unchanged" in err
    assert (project / "manifest.lock.json").stat().st_mtime_ns == before.st_mtime_ns


def test_a_dry_run_prints_the_same_plan_and_writes_nothing(project: Path) -> None:
    _, dry, err = run("mix", project / "manifest.yaml", "--dry-run")
    assert not (project / "manifest.lock.json").exists()
    assert "dry run" in err
    _, wet, _ = run("mix", project / "manifest.yaml")
    assert dry == wet


def test_a_changed_manifest_conflicts_with_the_lock_until_overwrite(project: Path) -> None:
    manifest = project / "manifest.yaml"
    run("mix", manifest)
    manifest.write_text(manifest.read_text().replace("seed: 5", "seed: 6"))
    assert run("mix", manifest)[0] == 7
    assert run("mix", manifest, "--output", project / "other.lock.json")[0] == 0
    assert run("mix", manifest, "--overwrite")[0] == 0
    assert Lock.read(project / "manifest.lock.json").seed == 6


def test_the_json_plan_adds_up(project: Path) -> None:
    _, out, _ = run("mix", project / "manifest.yaml", "--json")
    plan = json.loads(out)
    assert (plan["status"], plan["lock"]) == ("written", str(project / "manifest.lock.json"))
    assert plan["digest"] == Lock.read(plan["lock"]).digest
    main = plan["stages"][0]["sources"]
    assert [s["source"] for s in main] == ["code", "web"]
    assert [s["rows"] for s in main] == [75, 425]
    assert [s["share_wanted"] for s in main] == [0.15, 0.85]
    assert sum(s["tokens"] for s in plan["sources"]) == plan["tokens"] == 8000
    assert plan["sources"][0]["epochs"] == 75 / 124
    assert plan["sources"][0]["tokens_in_no_row"] == 2000 - 124 * 16 - 1


def test_the_lock_works_from_another_folder_and_moves_with_its_tree(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run("mix", project / "manifest.yaml", "--output", project / "locks/a.lock.json")
    moved = tmp_path_factory.mktemp("moved") / "tree"
    project.rename(moved)
    assert len(Lock.read(moved / "locks/a.lock.json").open_datasets()) == 2
    moved.rename(project)


def test_a_dataset_that_is_not_there_is_an_input_error_with_the_manifests_line(
    project: Path,
) -> None:
    manifest = project / "manifest.yaml"
    manifest.write_text(manifest.read_text().replace("tokens/web", "tokens/wob"))
    code, _, err = run("mix", manifest)
    assert code == 4
    assert "manifest.yaml:5" in err
    assert not (project / "manifest.lock.json").exists()


def test_opening_a_lock_on_another_dataset_names_what_differs(project: Path) -> None:
    run("mix", project / "manifest.yaml")
    (project / "tokens/web").rename(project / "tokens/old")
    write_dataset(project / "tokens/web", random_shards(np.random.default_rng(1), [[50] * 100]))
    with pytest.raises(ValidationError, match="'web' is not the one in the lock") as error:
        Lock.read(project / "manifest.lock.json").open_datasets()
    assert "tokens 5,000, in the lock 6,110" in str(error.value)
    assert error.value.exit_code == 3


def test_a_source_smaller_than_a_row_is_refused_with_the_numbers(project: Path) -> None:
    manifest = project / "manifest.yaml"
    manifest.write_text(manifest.read_text().replace("length: 16", "length: 2048"))
    code, _, err = run("mix", manifest)
    assert code == 4
    assert "'code' has 2,000 tokens; one row takes 2,049" in err


def test_the_output_must_be_a_json_file(project: Path) -> None:
    assert run("mix", project / "manifest.yaml", "--output", project / "lock")[0] == 2


def test_a_lock_can_be_written_to_and_read_from_s3(project: Path, s3: dict[str, str]) -> None:
    url = f"s3://{s3['bucket']}/mix/m.lock.json"
    assert run("mix", project / "manifest.yaml", "--output", url)[0] == 0
    assert "unchanged" in run("mix", project / "manifest.yaml", "--output", url)[2]
    assert len(Lock.read(url).open_datasets()) == 2


def test_the_plan_says_what_rows_a_stage_is_trained_in(project: Path) -> None:
    manifest = project / "manifest.yaml"
    manifest.write_text(
        manifest.read_text().replace("name: main,", "name: main, sequence_length: 4,")
        + "  - {name: long, tokens: 1K, weights: {web: 1}}\n"
    )
    stages = json.loads(run("mix", manifest, "--dry-run", "--json")[1])["stages"]
    assert [stage["sequence_length"] for stage in stages] == [4, 16]


# Promises of compiling: exact shares and boundaries, one digest, refusals that name both sides.
def test_every_prefix_of_the_run_holds_each_source_within_a_row_of_its_share() -> None:
    lock = compiled(MANIFEST.replace("2048", "4000"))
    schedule = lock.schedule()
    place = schedule.locate(np.arange(lock.total_rows))
    start = 0
    for stage in lock.stages:
        here = place.source[start : start + stage.rows]
        for index, wanted in enumerate(map(Fraction, stage.wanted)):
            drawn, slots = np.cumsum(here == index), np.arange(1, stage.rows + 1)
            assert np.abs(drawn - slots * float(wanted)).max() < 1
        start += stage.rows


def test_stage_ends_are_token_counts_of_the_run_rounded_down_once() -> None:
    stages = "\n".join(f"  - {{name: s{i}, tokens: 2500, weights: {{web: 1}}}}" for i in range(20))
    text = MANIFEST[: MANIFEST.index("stages:")] + "stages:\n" + stages
    lock = compiled(text.replace("2048", "1000"))
    assert [stage.rows for stage in lock.stages] == [2, 3] * 10
    assert lock.total_rows == 50


def test_extending_the_last_stage_changes_no_earlier_row() -> None:
    end, longer_end = (
        "5M,  tokens_from: {web: 2M, code: 3M}",
        "20M, tokens_from: {web: 8M, code: 12M}",
    )
    short, long = compiled(MANIFEST), compiled(MANIFEST.replace(end, longer_end))
    rows = np.arange(short.total_rows)
    ours, theirs = short.schedule().locate(rows), long.schedule().locate(rows)
    assert np.array_equal(ours.source, theirs.source)
    assert np.array_equal(ours.row, theirs.row)


def test_the_order_of_sources_in_the_manifest_has_no_meaning() -> None:
    lines = MANIFEST.splitlines()
    lines[5], lines[6] = lines[6], lines[5]
    swapped = "\n".join(lines).replace("web: 85, code: 15", "code: 15, web: 85")
    assert compiled(swapped).digest == compiled(MANIFEST).digest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("20260101", "1"),
        ("2048", "1024"),
        ("95M", "94M"),
        ("85", "86"),
        ("2.5", "2"),
        ("web", "wep"),
    ],
)
def test_whatever_changes_the_run_changes_the_digest(old: str, new: str) -> None:
    assert compiled(MANIFEST.replace(old, new)).digest != compiled(MANIFEST).digest


@pytest.mark.parametrize(
    "options", [{"tokenizer": "two"}, {"vocab_size": 501}, {"bos": 1}], ids=lambda o: next(iter(o))
)
def test_sources_of_different_tokenizers_are_refused_naming_both(options: dict[str, Any]) -> None:
    mixture = parse_mixture(MANIFEST)
    opened = stand_ins(mixture) | {"web": stand_in_dataset("web", 60_000_000, **options)}
    with pytest.raises(
        ValidationError, match=r"'code' and 'web' were .* different tokenizers"
    ) as error:
        MixPlan(mixture, opened).compile()
    assert (error.value.exit_code, error.value.where) == (3, "manifest.yaml:6")


def test_sources_may_differ_in_dtype() -> None:
    mixture = parse_mixture(MANIFEST)
    opened = stand_ins(mixture) | {"web": stand_in_dataset("web", 60_000_000, dtype="uint32")}
    assert [s.dtype for s in MixPlan(mixture, opened).compile().sources] == ["uint16", "uint32"]
