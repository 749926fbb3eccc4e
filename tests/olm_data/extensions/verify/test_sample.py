"""`verify --sample`: spread evenly, the same for a seed, honest about what it left out."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from support.forged import flip
from support.small_datasets import write_dataset
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.cli import cli
from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError
from olm_data.extensions.verify.datasets import verify
from olm_data.extensions.verify.shard import PIECE_BYTES, SamplePlan, choose

pytestmark = pytest.mark.xdist_group("verify-sample")  # its fixtures are made once


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    source = write_jsonl(folder / "a.jsonl", texts(300))
    make_dataset([source], tiny_tokenizer, folder / "out", shard_tokens=300, holdout="1/8")
    return folder / "out"


shares = st.fractions(Fraction(1, 1000), 1)


@given(total=st.integers(0, 500), share=shares, key=st.text(max_size=5))
def test_a_choice_has_the_size_asked_for_and_is_spread_evenly(
    total: int, share: Fraction, key: str
) -> None:
    chosen = choose(key, total, share)
    assert len(chosen) == -(-total * share // 1)
    assert sorted(set(chosen)) == chosen == choose(key, total, share)
    assert all(0 <= number < total for number in chosen)
    for k, number in enumerate(chosen):
        assert total * k // len(chosen) <= number < total * (k + 1) // len(chosen)


def test_pieces_cover_all_token_files_at_share_one_and_differ_by_seed(tmp_path: Path) -> None:
    documents = [[np.zeros(PIECE_BYTES * n // 4 + n, np.uint32)] for n in (1, 3, 2, 6)]
    manifest = write_dataset(tmp_path / "d", documents)
    whole = SamplePlan(manifest, Fraction(1), 0)
    sizes = [128 + 2 * info.tokens for info in manifest.shards]
    assert whole.pieces == [list(range(-(-size // PIECE_BYTES))) for size in sizes]
    assert whole.whole.all()
    some = [SamplePlan(manifest, Fraction(1, 3), seed).pieces for seed in range(8)]
    assert some[0] == SamplePlan(manifest, Fraction(1, 3), 0).pieces
    assert any(pieces != some[0] for pieces in some)
    assert {sum(map(len, pieces)) for pieces in some} == {-(-sum(map(len, whole.pieces)) // 3)}
    report = verify(str(tmp_path / "d"), sample=Fraction(1, 3))
    assert report.bytes_read <= PIECE_BYTES * sum(map(len, some[0]))
    assert report.bytes_read + report.unread_bytes == sum(sizes)


def test_a_sound_dataset_passes_and_what_was_not_read_is_said(made: Path) -> None:
    report = verify(str(made), sample=Fraction(1, 10))
    assert report.findings == []
    assert report.unread_bytes > 0
    shards = len(Dataset.open(str(made)).manifest.shards)
    note = report.notes[0]
    assert "of the rest only presence and size were checked" in note
    assert f"of {-(-shards // 10):,} of {shards:,} shards" in note
    assert report.sample == "1/10"


def test_every_flipped_block_is_found_by_some_seed_and_never_by_a_sample_that_left_it_out(
    dataset: Path,
) -> None:
    path = dataset / "shard-00003.tokens.npy"
    flip(path)
    manifest = Dataset.open(str(dataset)).manifest
    found = set()
    for seed in range(6):
        chosen = bool(SamplePlan(manifest, Fraction(1, 4), seed).pieces[3])
        report = verify(str(dataset), sample=Fraction(1, 4), seed=seed)
        # the documents of the round trip meet the damage as well, but only where all else is sound
        named = [item.field for item in report.findings if item.file == str(path)]
        assert ("blocks" in named) == chosen
        found.add(chosen)
    assert found == {True, False}


@pytest.mark.parametrize("kind", ["tokens.npy", "ends.npy", "docs.parquet", "json"])
def test_missing_and_truncated_files_are_found_in_every_shard(kind: str, dataset: Path) -> None:
    path = dataset / f"shard-00002.{kind}"
    path.write_bytes(path.read_bytes()[:-1])
    assert str(path) in {
        item.file for item in verify(str(dataset), sample=Fraction(1, 100)).findings
    }
    path.unlink()
    assert str(path) in {
        item.file for item in verify(str(dataset), sample=Fraction(1, 100)).findings
    }


def test_d8_a_sample_of_all_reads_every_byte_and_finds_every_flip(dataset: Path) -> None:
    """The documents' rows past the first columns are what no sample looks at."""
    every = verify(str(dataset))
    for text in ("100%", "1", "3/3"):
        done = olm_data_inside("verify", str(dataset), "--sample", text, "--json")
        report = json.loads(done.stdout)
        assert (done.exit_code, report["sample"], report["unread_bytes"]) == (0, None, 0)
        assert report["bytes_read"] == every.bytes_read
    for name in ("shard-00001.docs.parquet", "shard-00002.ends.npy", "shard-00003.tokens.npy"):
        data = bytearray((dataset / name).read_bytes())
        data[len(data) // 2] ^= 1
        (dataset / name).write_bytes(data)
        found = verify(str(dataset), sample=Fraction(1)).findings
        assert any(item.file.endswith(name) for item in found)


def olm_data_inside(*words: str) -> Result:
    return CliRunner().invoke(cli, words, standalone_mode=False)


def test_d8_more_than_all_is_refused(made: Path) -> None:
    assert isinstance(
        olm_data_inside("verify", str(made), "--sample", "101%").exception, UsageError
    )
