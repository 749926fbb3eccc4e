"""Row 36: a fast encoder that disagrees with the reference is found, before or during a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import olm_data.encoders as encoders
from olm_data.encoders import TextEncoder, choose_encoder, gate
from olm_data.encoders.base import AUDIT_EVERY, concatenate
from olm_data.encoders.hf import HfEncoder
from olm_data.errors import ValidationError
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer

SAMPLE = concatenate(f"document {k}".encode() for k in range(100))


@pytest.fixture(scope="module")
def spec(tiny_tokenizer: Path) -> TokenizerSpec:
    return load_tokenizer(tiny_tokenizer)


@pytest.fixture(autouse=True)
def small_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of few code points, and a cache of its own: the encoders here are not real."""
    monkeypatch.setattr(gate, "NEAR", [range(0x20, 0x180)])
    monkeypatch.setattr(gate, "FAR", [range(0x40000, 0x40040)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class OneWrong:
    """The reference, but for one id of the documents that contain a text."""

    name = "gigatoken"

    def __init__(
        self, tokenizer: TokenizerSpec, special: str, wrong: bytes = b"document 57"
    ) -> None:
        self._inner = HfEncoder(tokenizer, "plain")
        self._wrong = wrong
        self.calls = 0

    def encode(self, data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.calls += 1
        ids, ends = self._inner.encode(data, offsets)
        ids = ids.copy()
        for k in range(len(offsets) - 1):
            if data[offsets[k] : offsets[k + 1]].tobytes() == self._wrong:
                ids[ends[k + 1] - 1] += 1
        return ids, ends


def test_auto_falls_back_to_the_reference_and_says_so(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(encoders.ENCODERS, "gigatoken", OneWrong)
    report = choose_encoder("auto", spec, "plain", SAMPLE)
    assert report.encoder == "hf"
    assert "gigatoken is not used with this tokenizer" in report.note
    assert "document 57" in report.note
    assert report.claim == "the reference: gigatoken failed the gate"


def test_an_encoder_asked_for_by_name_that_fails_the_gate_is_an_error(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(encoders.ENCODERS, "gigatoken", OneWrong)
    with pytest.raises(ValidationError, match="other ids than the reference"):
        choose_encoder("gigatoken", spec, "plain", SAMPLE)


@pytest.mark.parametrize("text", ["caf\u00e9 cafe\u0301", "a" * 10_000, "\x00", "<|endoftext|>"])
def test_the_gate_knows_texts_on_which_encoders_have_differed(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    from olm_data.encoders.gate import adversarial

    wrong = next(t for t in adversarial(spec) if text.encode() in t)
    monkeypatch.setitem(
        encoders.ENCODERS,
        "gigatoken",
        lambda tokenizer, special: OneWrong(tokenizer, special, wrong),
    )
    assert choose_encoder("auto", spec, "plain", concatenate([])).encoder == "hf"


def test_lost_and_doubled_tokens_and_moved_ends_are_found(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(change: object) -> object:
        class Changed(OneWrong):
            def encode(
                self, data: np.ndarray, offsets: np.ndarray
            ) -> tuple[np.ndarray, np.ndarray]:
                return change(*self._inner.encode(data, offsets))  # type: ignore[operator]

        return Changed

    changes = (
        lambda ids, ends: (ids[:-1], np.minimum(ends, len(ids) - 1)),
        lambda ids, ends: (np.append(ids, ids[-1:]), np.append(ends[:-1], ends[-1] + 1)),
        lambda ids, ends: (ids, np.concatenate([ends[:1], ends[1:2] - 1, ends[2:]])),
    )
    for change in changes:
        monkeypatch.setitem(encoders.ENCODERS, "gigatoken", make(change))
        assert choose_encoder("auto", spec, "plain", SAMPLE).encoder == "hf"


def test_every_ten_thousandth_document_is_audited_across_batches(spec: TokenizerSpec) -> None:
    made = []

    def reference() -> HfEncoder:
        made.append(1)
        return HfEncoder(spec, "plain")

    def run(wrong_at: int) -> None:
        wrong = f"document {wrong_at}".encode()
        text = TextEncoder(OneWrong(spec, "plain", wrong), spec, "plain", reference)
        for start in range(0, 2 * AUDIT_EVERY + 1, 700):
            batch = concatenate(f"document {k}".encode() for k in range(start, start + 700))
            text.encode(*batch, where=lambda k, start=start: f"row {start + k}")  # type: ignore[misc]

    for seen in (AUDIT_EVERY - 1, 2 * AUDIT_EVERY - 1):
        with pytest.raises(ValidationError, match="disagrees with the reference") as caught:
            run(seen)
        assert f"row {seen}" in str(caught.value)
    run(AUDIT_EVERY)
    assert len(made) == 3
