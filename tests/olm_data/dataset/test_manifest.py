"""The manifest: its digest covers it, and what was edited or leads elsewhere is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from support.small_datasets import write_dataset

from olm_data.bounded_json import canonical_json
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import decode_manifest
from olm_data.errors import InputError, ValidationError

SHARDS = [[[1, 2, 3], [4], [5, 6]], [[7, 8, 9, 10, 11]]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "d", SHARDS)
    return tmp_path / "d"


def test_manifest_digest_is_the_sha256_of_its_canonical_json(path: Path) -> None:
    body = json.loads((path / "manifest.json").read_text())
    digest = body.pop("digest")
    body.pop("tools")
    assert hashlib.sha256(canonical_json(body)).hexdigest() == digest


def test_a_folder_without_a_manifest_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no manifest\.json"):
        Dataset.open(str(tmp_path))
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(InputError, match="unfinished"):
        Dataset.open(str(tmp_path))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m["shards"][0].update(tokens=7), "digest"),
        (lambda m: m.update(dtype="uint32"), "digest"),
        (lambda m: m.update(extra=1), "malformed"),
        (lambda m: m.pop("totals"), "malformed"),
        (lambda m: m.update(version=3), "version 3"),
    ],
)
def test_an_edited_manifest_is_refused(path: Path, edit, message: str) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    edit(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValidationError, match=message):
        Dataset.open(str(path))


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m["totals"].update(trained=1),
        lambda m: m["shards"][0].update(trained=1),
        lambda m: m["shards"][0]["sha256"].update(labels="0" * 64),
    ],
)
def test_half_of_what_labels_need_is_refused(path: Path, edit) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    edit(manifest)
    body = {k: v for k, v in manifest.items() if k not in ("digest", "tools")}
    manifest["digest"] = hashlib.sha256(canonical_json(body)).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValidationError, match="trained tokens does not go together"):
        Dataset.open(str(path))


def test_what_an_earlier_text_names_by_its_digest_is_known_by_it_alone(path: Path) -> None:
    """A run that goes on opens 10^5 shards: whoever wrote its lock has looked at the text."""
    data = (path / "manifest.json").read_bytes()
    twice = data.replace(b'"container"', b'"container": "npy", "container"', 1)
    known = decode_manifest(data, "there")
    assert decode_manifest(twice, "there", str(known.digest)) == known
    for digest in (None, "0" * 64):
        with pytest.raises(ValidationError, match="stands twice"):
            decode_manifest(twice, "there", digest)


def test_a_key_that_stands_twice_in_a_manifest_is_refused_though_its_digest_holds(
    path: Path,
) -> None:
    text = (path / "manifest.json").read_text()
    for key in ('"dtype"', '"documents"', '"docs"'):
        place, value = text.index(key), "7" if key == '"documents"' else '"x"'
        twice = f"{text[:place]}{key}: {value}, {text[place:]}"
        (path / "manifest.json").write_text(twice)
        with pytest.raises(ValidationError, match="malformed"):
            Dataset.open(str(path))
    spelled = text.replace('"dtype"', '"d\\u0074ype"')  # an escape: read the long way, and good
    (path / "manifest.json").write_text(spelled)
    Dataset.open(str(path))
