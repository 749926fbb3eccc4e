"""A shard reads back exactly; what was changed since it was written is found before it is used."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_datasets import write_dataset

from olm_data.dataset.manifest import Manifest, ShardDigests
from olm_data.dataset.record import BLOCK_BYTES, HEADER_BYTES, npy_header
from olm_data.dataset.shard import Shard
from olm_data.errors import ValidationError
from olm_data.storage.store import Store

NAME = "shard-00000"
LENGTHS = [1, 30_000, 2, 69_997]  # 100,000 tokens of 2 bytes: four blocks
IDS = np.arange(sum(LENGTHS)) % 50_000
BLOCK = BLOCK_BYTES // 2


def write(folder: Path, container: str = "npy") -> Manifest:
    documents = np.split(IDS.astype(np.uint32), np.cumsum(LENGTHS)[:-1])
    return write_dataset(folder, [documents], container=container)  # type: ignore[arg-type]


def opened(folder: Path, manifest: Manifest, **options: Any) -> Shard:
    info = manifest.shards[0]
    known = {
        "dtype": np.dtype(manifest.dtype),
        "tokens": info.tokens,
        "documents": info.documents,
        "sha256": info.sha256,
        "verify": "lazy",
        "container": manifest.container,
    }
    return Shard(Store(folder), NAME, **(known | options))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Manifest]]:
    """A shard in each container; tests do not change these."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("npy", "raw")}
    return {kind: (folder, write(folder, kind)) for kind, folder in folders.items()}


@pytest.fixture
def shard(tmp_path: Path) -> tuple[Path, Manifest]:
    return tmp_path, write(tmp_path)


def flip(folder: Path, token: int, file: str = "tokens.npy") -> None:
    """Change a bit of one token."""
    with open(folder / f"{NAME}.{file}", "r+b") as changed:
        changed.seek(HEADER_BYTES + 2 * token)
        byte = changed.read(1)[0]
        changed.seek(-1, 1)
        changed.write(bytes([byte ^ 1]))


def forged(folder: Path, manifest: Manifest, ends: list[int]) -> ShardDigests:
    """Write other ends and return digests by which they are right."""
    data = npy_header(np.dtype(np.uint64), len(ends)) + np.array(ends, np.uint64).tobytes()
    (folder / f"{NAME}.ends.npy").write_bytes(data)
    ends_sha256 = hashlib.sha256(data).hexdigest()
    return msgspec.structs.replace(manifest.shards[0].sha256, ends=ends_sha256)


# --- reading -------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, len(IDS)),
    st.integers(0, len(IDS)),
    st.sampled_from(["npy", "raw"]),
    st.sampled_from(["off", "lazy", "full"]),
    st.booleans(),
)
def test_every_range_of_tokens_reads_back(
    shards: dict[str, tuple[Path, Manifest]],
    first: int,
    second: int,
    container: str,
    verify: str,
    mapped: bool,
) -> None:
    start, stop = sorted((first, second))
    found = opened(*shards[container], verify=verify, mapped=mapped).read(start, stop)
    assert found.dtype == np.uint16
    assert np.array_equal(found, IDS[start:stop])


def test_ends_and_record_are_those_of_the_documents(
    shards: dict[str, tuple[Path, Manifest]],
) -> None:
    for container, (folder, manifest) in shards.items():
        for mapped in (True, False):
            shard = opened(folder, manifest, mapped=mapped)
            assert shard.ends.tolist() == np.cumsum(LENGTHS).tolist(), container
            assert (shard.record.tokens, shard.record.documents) == (len(IDS), len(LENGTHS))


def test_a_token_file_may_have_a_name_of_its_own(shard: tuple[Path, Manifest]) -> None:
    folder, manifest = shard
    (folder / f"{NAME}.tokens.npy").rename(folder / "theirs.npy")
    assert opened(folder, manifest, file="theirs.npy").read(5, 8).tolist() == [5, 6, 7]


# --- damage to the tokens ------------------------------------------------------------------------
@pytest.mark.parametrize("mapped", [True, False])
def test_lazily_a_changed_block_is_found_when_it_is_touched(
    shard: tuple[Path, Manifest], mapped: bool
) -> None:
    folder, manifest = shard
    flip(folder, 2 * BLOCK + 5)
    found = opened(folder, manifest, mapped=mapped)
    assert found.read(0, BLOCK).tolist() == IDS[:BLOCK].tolist()
    for _ in range(2):  # it stays unchecked
        with pytest.raises(ValidationError, match=r"bytes 131,072 to 196,608 have changed"):
            found.read(2 * BLOCK, 2 * BLOCK + 1)
    assert found.read(3 * BLOCK, len(IDS)).tolist() == IDS[3 * BLOCK :].tolist()


def test_full_finds_it_at_once_and_off_never(shard: tuple[Path, Manifest]) -> None:
    folder, manifest = shard
    flip(folder, 99_999)
    with pytest.raises(ValidationError, match="have changed"):
        opened(folder, manifest, verify="full")
    assert opened(folder, manifest, verify="off").read(99_999, 100_000) != IDS[-1]


def test_a_block_is_checked_once(shard: tuple[Path, Manifest]) -> None:
    folder, manifest = shard
    found = opened(folder, manifest)
    starts = np.array([0, BLOCK - 60, BLOCK, 3 * BLOCK])
    assert found.is_checked(starts, 100).tolist() == [False] * 4
    found.check(0, 10)
    assert found.is_checked(starts, 100).tolist() == [True, False, False, False]
    found.check(0, len(IDS))
    assert found.is_checked(starts, 100).all()
    flip(folder, 3)
    found.check(0, 10)
    assert opened(folder, manifest, verify="off").is_checked(starts, 100).all()
    assert not opened(folder, manifest, mapped=False).is_checked(starts, 100).any()


# --- damage that shows at open -------------------------------------------------------------------
@pytest.mark.parametrize("file", ["tokens.npy", "ends.npy"])
@pytest.mark.parametrize("verify", ["off", "lazy", "full"])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_of_another_size_is_refused_at_open(
    shard: tuple[Path, Manifest], file: str, verify: str, mapped: bool
) -> None:
    folder, manifest = shard
    path = folder / f"{NAME}.{file}"
    whole = path.read_bytes()
    for data in (whole[:-1], whole + b"\0", whole[:10], b""):
        path.write_bytes(data)
        with pytest.raises(ValidationError, match=rf"has {len(data):,} bytes, not {len(whole):,}"):
            opened(folder, manifest, verify=verify, mapped=mapped)
    path.unlink()
    with pytest.raises(ValidationError, match="the file is missing"):
        opened(folder, manifest, verify=verify, mapped=mapped)


@pytest.mark.parametrize("mapped", [True, False])
def test_ends_are_checked_by_digest_and_by_sense(
    shard: tuple[Path, Manifest], mapped: bool
) -> None:
    folder, manifest = shard
    total = len(IDS)
    forged(folder, manifest, [1, 2, 3, total])
    with pytest.raises(ValidationError, match="do not match their digest"):
        opened(folder, manifest, mapped=mapped)
    for ends, message in (
        ([0, 2, 3, total], "do not rise"),
        ([1, 3, 3, total], "do not rise"),
        ([1, 3, 2, total], "do not rise"),
        ([1, 2, 3, total - 1], "does not end at token 100,000"),
        ([1, 2, 3, 2**63], "does not end at token 100,000"),
    ):
        digests = forged(folder, manifest, ends)
        for verify in ("off", "lazy"):
            with pytest.raises(ValidationError, match=message):
                opened(folder, manifest, mapped=mapped, verify=verify, sha256=digests)


def test_another_commit_record_is_refused_on_first_use(shard: tuple[Path, Manifest]) -> None:
    folder, manifest = shard
    digests = msgspec.structs.replace(manifest.shards[0].sha256, record="0" * 64)
    found = opened(folder, manifest, sha256=digests)
    with pytest.raises(ValidationError, match="digest"):
        found.read(0, 1)
