"""Files on S3 are listed and read as local ones are."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.inputs import jsonl
from support.reading import read_plan, resolve_source

from olm_data.errors import InputError
from olm_data.sources import current_revision


def test_files_on_s3_read_as_local_ones_do(tmp_path: Path, s3: dict[str, str]) -> None:
    from support.s3 import client

    own = client(s3)
    local = []
    for name in ("a.jsonl", "sub/b.jsonl"):
        path = jsonl(tmp_path / name, *(f"{name} {k}" for k in range(100)))
        own.put_object(Bucket=s3["bucket"], Key=f"text/{name}", Body=path.read_bytes())
        local.append(path)
    here = read_plan(resolve_source([str(tmp_path)]), 500)
    plan = resolve_source([f"s3://{s3['bucket']}/text"])
    there = read_plan(plan, 500)
    assert (here.texts, here.places) == (there.texts, there.places)
    assert there.units > 4
    assert all(current_revision(file) == file.revision for file in plan.inputs)
    own.put_object(Bucket=s3["bucket"], Key="text/a.jsonl", Body=b"other")
    assert current_revision(plan.inputs[0]) != plan.inputs[0].revision
    assert [f.path for f in resolve_source([f"s3://{s3['bucket']}/text/sub/*.jsonl"]).inputs] == [
        "b.jsonl"
    ]
    with pytest.raises(InputError, match="no such file"):
        resolve_source([f"s3://{s3['bucket']}/text/nothing.jsonl"])
