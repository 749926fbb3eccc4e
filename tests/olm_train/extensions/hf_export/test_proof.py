"""A proof belongs to what is written: what reads otherwise leaves no folder behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hf_exports import OLMO2, trained

from olm_data.errors import ValidationError
from olm_train.extensions.hf_export import export as exporting
from olm_train.extensions.hf_export import job
from olm_train.extensions.hf_export.job import Options
from olm_train.extensions.hf_export.proof import why_not_computed


def test_a_folder_that_computes_otherwise_is_never_there(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = trained(tiny_mixture, tmp_path / "run", OLMO2)
    whole = job.rounded
    monkeypatch.setattr(job, "rounded", lambda value, planned: whole(value, planned) * 1.01)
    with pytest.raises(ValidationError, match="gives logits that differ by"):
        exporting.export(checkpoint, str(tmp_path / "hf"), Options(check="transformers"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    found = job.Job(checkpoint, Options(check="files"), exporting.model_config(checkpoint))
    assert why_not_computed(found).endswith("--verify files")
