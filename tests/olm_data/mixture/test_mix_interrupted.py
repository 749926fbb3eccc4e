"""A `mix` that is killed, or that finds the disk full, leaves nothing that is in the way."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.faulty_disk import fail, faults, kill
from support.small_datasets import write_dataset

from olm_data.errors import ResourceError
from olm_data.extensions.doctor.doctor import clean
from olm_data.mixture.mix import mix

KILLED = """\
import os, sys
from olm_data.mixture import mix
def kill(dataset, packing, length, folder, scan):
    (folder / "half").write_bytes(b"x" * 1000)
    os._exit(9)
mix.write_plan = kill
mix.mix(sys.argv[1], dry_run=len(sys.argv) > 2)
"""
HELD = """\
import sys
from pathlib import Path
from olm_data.storage.disk import scratch
with scratch(Path(sys.argv[1]) if len(sys.argv) > 1 else None) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("olm_data.extensions.doctor.doctor.abandoned_sockets", list)
    write_dataset(tmp_path / "data", [[[1] * 40, [2] * 50]])
    path = tmp_path / "run" / "mix.yaml"
    path.write_text(
        "version: 1\nseed: 1\nsequence_length: 16\npacking: best_fit\n"
        "sources: {web: {data: ../data, max_epochs: 9}}\n"
        "stages: [{name: main, tokens: 64, weights: {web: 1}}]\n"
    )
    return path


def kill_one(manifest: Path, *words: str) -> None:
    run = subprocess.run([sys.executable, "-c", KILLED, str(manifest), *words])
    assert run.returncode == 9


@pytest.mark.parametrize("words", [(), ("dry run",)])
def test_gc_names_what_a_killed_mix_left_and_the_next_mix_clears_it(
    manifest: Path, words: tuple[str, ...]
) -> None:
    folder = manifest.parent if not words else manifest.parents[1] / "tmp"
    before = set(folder.iterdir())
    kill_one(manifest, *words)
    (left,) = set(folder.iterdir()) - before
    (stale,) = clean(str(manifest.parent), 0, dry_run=True).found
    assert (Path(stale.name), stale.bytes >= 1000) == (left, True)
    mix(str(manifest))
    assert not left.exists()
    assert {path.name for path in manifest.parent.iterdir()} == {
        *("mix.yaml", "mix.lock.json", "row-plans")
    }


def test_gc_deletes_what_a_killed_mix_left(manifest: Path) -> None:
    kill_one(manifest)
    place = str(manifest.parent)
    assert clean(place, 3600).found == []
    clean(place, 0)
    assert [path.name for path in manifest.parent.iterdir()] == ["mix.yaml"]


def test_the_folder_of_a_living_mix_stays(manifest: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HELD, str(manifest.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        held = Path(other.stdout.readline().strip())
        mix(str(manifest))
        assert held.exists()
        other.communicate()
    assert not held.exists()


def test_best_fit_on_a_full_disk_says_so_at_any_operation(manifest: Path) -> None:
    with faults(-1, kill) as count:
        lock = mix(str(manifest)).lock.digest
    operations = len(count.log)
    assert any("starts" in name for name in count.log)
    for at in range(operations):
        shutil.rmtree(manifest.parent / "row-plans", ignore_errors=True)
        (manifest.parent / "mix.lock.json").unlink(missing_ok=True)
        with (
            pytest.raises(ResourceError, match="no space left") as caught,
            faults(at, fail(errno.ENOSPC)),
        ):
            mix(str(manifest))
        assert caught.value.exit_code == 5
    assert mix(str(manifest)).lock.digest == lock
