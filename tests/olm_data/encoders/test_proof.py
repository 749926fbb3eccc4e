"""Row D1: a proof is kept in the user's cache, trusted only if whole, and said as it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import olm_data.encoders as encoders
from olm_data.encoders import SMALL_TEXT, choose_encoder, gate, known_encoder
from olm_data.encoders import code_points as proof
from olm_data.encoders.base import concatenate
from olm_data.encoders.code_points import Proof, recall, remember
from olm_data.encoders.hf import HfEncoder
from olm_data.errors import ValidationError
from olm_data.tokenizer.tokenizer import TokenizerSpec, spec_from_bytes

PROOF = Proof(routed=((0x898, 0x89F), (0x1ACF, 0x1ACF)))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def only_file(cache: Path) -> Path:
    (path,) = (path for path in cache.rglob("*") if path.is_file())
    return path


def test_what_is_remembered_is_recalled_for_the_same_case_only(
    spec: TokenizerSpec, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(PROOF, "gigatoken", spec, "plain")
    assert only_file(cache).parent == cache / "olm" / "encoders"
    assert recall("gigatoken", spec, "plain") == recall("gigatoken", spec, "error") == PROOF
    assert recall("gigatoken", spec, "allow") is None
    other = spec_from_bytes(spec.json_bytes + b" ", name="t")
    assert recall("gigatoken", other, "plain") is None
    for name, value in (("GATE", 0), ("version", lambda package: "9.9"), ("unidata_version", "99")):
        with monkeypatch.context() as changed:
            changed.setattr(proof, name, value)
            assert recall("gigatoken", spec, "plain") is None


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b'{"refused": "", "routed": [], "sha256": ""}',
        b" " * (1 << 20),
        "flip",
        "widen",
    ],
)
def test_a_damaged_or_forged_proof_is_none(
    spec: TokenizerSpec, cache: Path, damage: bytes | str
) -> None:
    remember(PROOF, "gigatoken", spec, "plain")
    path = only_file(cache)
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        stored = json.loads(path.read_bytes())
        stored["routed"] = [[0x41, 0x42]] if damage == "widen" else stored["routed"][:1]
        path.write_text(json.dumps(stored))
    assert recall("gigatoken", spec, "plain") is None
    remember(PROOF, "gigatoken", spec, "plain")
    assert recall("gigatoken", spec, "plain") == PROOF


def test_a_proof_others_can_write_or_that_is_no_file_is_none(
    spec: TokenizerSpec, cache: Path
) -> None:
    remember(PROOF, "gigatoken", spec, "plain")
    path = only_file(cache)
    path.chmod(0o666)
    assert recall("gigatoken", spec, "plain") is None
    path.chmod(0o600)
    moved = path.rename(cache / "elsewhere")
    path.symlink_to(moved)
    assert recall("gigatoken", spec, "plain") is None
    path.unlink()
    os.mkfifo(path)
    assert recall("gigatoken", spec, "plain") is None


def test_a_cache_that_cannot_be_written_is_no_error(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    remember(PROOF, "gigatoken", spec, "plain")
    assert recall("gigatoken", spec, "plain") is None


@pytest.mark.parametrize("refused", ["", "it differs on 5,000 code points"])
def test_the_second_run_compares_nothing_and_says_the_same(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.setattr(gate, "NEAR", [range(0x20, 0x300)])
    monkeypatch.setattr(gate, "FAR", ())
    if refused:
        monkeypatch.setattr("olm_data.encoders.gate.prove", lambda *_: Proof(refused=refused))
    assert known_encoder("auto", spec, "plain", SMALL_TEXT) is None
    first = choose_encoder("auto", spec, "plain", concatenate([b"text"]))
    monkeypatch.setattr(encoders, "choose_encoder", None)
    monkeypatch.setattr(HfEncoder, "encode", None)
    assert known_encoder("auto", spec, "plain", SMALL_TEXT) == first
    if refused:
        assert first.encoder == "hf"
        assert "proved" not in first.claim
        assert f"gigatoken is not used with this tokenizer, as {refused}" in first.note
        with pytest.raises(ValidationError, match="other ids") as caught:
            known_encoder("gigatoken", spec, "plain", 0)
        assert caught.value.why == refused
    else:
        assert first.encoder == "gigatoken"
        assert first.claim.startswith(
            "the ids of hf, proved on every code point (in 9 contexts; 3 in"
        )


def test_little_text_is_encoded_by_the_reference_before_a_proof_would_be_done(
    spec: TokenizerSpec,
) -> None:
    report = known_encoder("auto", spec, "plain", SMALL_TEXT - 1)
    assert (report.encoder, report.claim) == ("hf", "the reference, as there is little text")
    assert known_encoder("gigatoken", spec, "plain", SMALL_TEXT - 1) is None
