"""A proof belongs to what is written: what reads otherwise leaves no folder behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.hf_exports import OLMO2, trained

from olm_data.errors import InputError, ValidationError
from olm_train.extensions.hf_export import export as exporting
from olm_train.extensions.hf_export import job
from olm_train.extensions.hf_export.export import why_not_computed
from olm_train.extensions.hf_export.job import ExportOptions


def test_a_folder_that_computes_otherwise_is_never_there(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = trained(tiny_mixture, tmp_path / "run", OLMO2)
    whole = job.rounded
    monkeypatch.setattr(job, "rounded", lambda value, planned: whole(value, planned) * 1.01)
    with pytest.raises(ValidationError, match="gives logits that differ by"):
        exporting.export(checkpoint, str(tmp_path / "hf"), ExportOptions(check="transformers"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    found = job.ExportJob(
        checkpoint, ExportOptions(check="files"), exporting.model_config(checkpoint)
    )
    assert why_not_computed(found).endswith("--verify files")


def test_no_address_in_the_lock_of_a_run_is_asked(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    shutil.copytree(tiny_mixture.parent, tmp_path / "mixture")
    lock = tmp_path / "mixture" / tiny_mixture.name
    checkpoint = trained(lock, tmp_path / "run", OLMO2)
    found = job.ExportJob(
        checkpoint, ExportOptions(check="files"), exporting.model_config(checkpoint)
    )
    assert exporting._rows(found)
    value = json.loads(lock.read_bytes())
    value["locations"] = dict.fromkeys(value["locations"], "s3://b/data")
    lock.write_text(json.dumps(value))
    with pytest.raises(InputError, match="which only you may open"):
        exporting._rows(found)
