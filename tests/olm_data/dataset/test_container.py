"""`container: raw`: the same dataset without NumPy headers, wherever a dataset can be used."""

from __future__ import annotations

import hashlib
import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from support.adding import add_to
from support.command import inside
from support.small_datasets import mix_datasets
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import ConflictError, ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.rows.reader import RowReader

OPTIONS = {"shard_tokens": 500, "holdout": "0.2"}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """A folder with the same text as `npy` and as `raw`."""
    folder = tmp_path_factory.mktemp("containers")
    source = write_jsonl(folder / "a.jsonl", texts(120))
    for container in ("npy", "raw"):
        make_dataset([source], tiny_tokenizer, folder / container, container=container, **OPTIONS)
    return folder


def test_a_raw_token_file_is_the_npy_file_without_its_header(both: Path) -> None:
    manifest = json.loads((both / "raw" / "manifest.json").read_text())
    assert manifest["container"] == "raw"
    assert len(manifest["shards"]) > 2
    for shard in manifest["shards"]:
        assert "file" not in shard
        raw = (both / "raw" / f"{shard['name']}.tokens.bin").read_bytes()
        assert raw == (both / "npy" / f"{shard['name']}.tokens.npy").read_bytes()[128:]
        assert hashlib.sha256(raw).hexdigest() == shard["sha256"]["tokens"]
        assert not (both / "raw" / f"{shard['name']}.tokens.npy").exists()
    split = Dataset.open(str(both / "raw" / "validation"))
    assert split.manifest.container == "raw"


@pytest.mark.parametrize("check", ["off", "lazy", "full"])
def test_every_document_and_range_reads_alike(both: Path, check: str) -> None:
    npy, raw = (Dataset.open(str(both / name), verify=check) for name in ("npy", "raw"))
    assert npy.tokens == raw.tokens
    assert npy.read(0, npy.tokens).tolist() == raw.read(0, raw.tokens).tolist()
    for number in range(npy.documents):
        ours, theirs = raw.document(number), npy.document(number)
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert (ours.id, ours.position) == (theirs.id, theirs.position)


def test_verify_show_stats_and_a_mixture_take_it(
    both: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for sample in (None, Fraction(1, 2)):
        report = verify(str(both / "raw"), sample=sample)
        assert report.ok, report.findings
    for command in (["show", "document"], ["stats"]):
        said = [inside(capsys, *command, both / n, "--json").stdout for n in ("npy", "raw")]
        shown = [_plain(text, both) for text in said]
        assert shown[0]
        assert shown[0] == shown[1]
    rows = []
    for name in ("npy", "raw"):
        folder = both / f"mixture-{name}"
        folder.mkdir()
        (folder / "text").symlink_to(both / name)  # the order depends on the source's name
        lock = mix_datasets(folder, ["text"], stages=[(2000, {"text": 1})], sequence_length=16)
        assert verify(str(lock)).ok
        rows.append(RowReader(lock).read(np.arange(125)))
    assert np.array_equal(rows[0].tokens, rows[1].tokens)
    assert np.array_equal(rows[0].cu_seqlens, rows[1].cu_seqlens)


def _plain(text: str, folder: Path) -> str:
    """What a command printed, without the name and the digest of the dataset."""
    for name in ("npy", "raw"):
        text = text.replace(str(folder / name), "")
    return "\n".join(line for line in text.splitlines() if "digest" not in line)


def test_it_is_read_from_a_bucket(s3: dict[str, str], tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(60))
    made = make_dataset([source], tiny_tokenizer, tmp_path / "npy", shard_tokens=500)
    url = f"s3://{s3['bucket']}/{tmp_path.name}/raw"
    make_dataset([source], tiny_tokenizer, url, shard_tokens=500, container="raw")
    dataset, local = Dataset.open(url), Dataset.open(made.output)
    for start, stop in ((0, 1), (3, local.tokens), (local.tokens - 1, local.tokens)):
        assert dataset.read(start, stop).tolist() == local.read(start, stop).tolist()
    assert verify(url).ok


def test_what_is_added_to_it_is_raw_too(tiny_tokenizer: Path, tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", texts(40))
    second = write_jsonl(tmp_path / "b.jsonl", texts(40, 40))
    out = tmp_path / "out"
    made = make_dataset([first], tiny_tokenizer, out, shard_tokens=500, container="raw")
    add_to(out, second)
    dataset = Dataset.open(str(out))
    assert len(dataset.manifest.shards) > len(made.manifest.shards)
    assert not list(out.glob("*.tokens.npy"))
    assert dataset.documents == 80
    assert verify(str(out)).ok


def test_the_option_is_part_of_the_plan(tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(10))
    make_dataset([source], tiny_tokenizer, tmp_path / "out")
    with pytest.raises(ConflictError, match="holds another dataset") as caught:
        make_dataset([source], tiny_tokenizer, tmp_path / "out", container="raw")
    assert "container" in caught.value.what


@pytest.mark.parametrize("damage", ["cut", "longer", "flip", "header"])
def test_damage_to_a_raw_file_is_found(damage: str, tiny_tokenizer: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(20))
    out = tmp_path / "out"
    made = make_dataset(
        [source], tiny_tokenizer, out, container="raw", shuffle_documents=True, seed=3
    )
    path = out / "shard-00000.tokens.bin"
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[11] ^= 1
    else:
        data = {"cut": data[:-2], "longer": data + b"\0\0", "header": bytes(128) + data}[damage]
    path.write_bytes(data)
    with pytest.raises(ValidationError, match="changed since" if damage == "flip" else "bytes"):
        Dataset.open(str(out)).read(0, made.manifest.totals.tokens)
    assert not verify(str(out)).ok
