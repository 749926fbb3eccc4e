"""olm-data export: what each option does."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
from support import exported
from support.command import Olm
from support.small_datasets import write_dataset

from olm_data.extensions.exporting.export import FORMATS, export

LINKED = ("olmo-core", "megatron", "datatrove")


def test_what_a_format_cannot_hold_is_said(tmp_path: Path, olm: Olm) -> None:
    write_dataset(tmp_path / "d", [[[1, 2]]], columns={"score": pa.array([0.5])}, eos=2)
    write_dataset(tmp_path / "d" / "validation", [[[3]]])
    for form in FORMATS:
        said = olm("export", tmp_path / "d", "--to", form, "--output", tmp_path / form)
        assert said.returncode == 0, said.stderr
        assert "documents  1\ntokens     2\n" in said.stdout
        assert "next:" in said.stderr
        assert f"held-out documents; export {tmp_path / 'd'}/validation" in said.stdout
        assert ("kept columns score" in said.stdout) == (form not in exported.HOLDS_COLUMNS)
        assert ("ids" in said.stdout.split("each document")[0]) == (form not in exported.HOLDS_IDS)
        assert "no EOS" not in said.stdout
    write_dataset(tmp_path / "bare", [[[1, 2]]])
    for form in ("olmo-core", "megatron"):
        done = export(str(tmp_path / "bare"), form, str(tmp_path / f"bare-{form}"))
        assert any("documents have no EOS" in sentence for sentence in done.lost)


def test_a_dry_run_writes_nothing_and_says_what_would_be_linked(tmp_path: Path, olm: Olm) -> None:
    write_dataset(tmp_path / "d", [[[1]], [[2, 3]]], container="raw")
    before = sorted(tmp_path.rglob("*"))
    words = ("--output", tmp_path / "x" / "out", "--dry-run", "--json")
    for form in FORMATS:
        said = olm("export", tmp_path / "d", "--to", form, *words)
        result = json.loads(said.stdout)
        assert (result["status"], result["tokens"]) == ("would write", 3)
        assert result["linked"] == (2 if form in LINKED else 0)
    assert sorted(tmp_path.rglob("*")) == before
