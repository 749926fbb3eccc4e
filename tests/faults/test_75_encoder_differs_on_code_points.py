"""Row 75: documents with code points on which an encoder differs have the reference's ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tokenizer_kinds import SPLITS, variant_of
from support.tokenizing import digests, make_dataset, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.encoders.base import concatenate
from olm_data.encoders.code_points import Proof, remember
from olm_data.tokenization.summary import RunResult
from olm_data.tokenizer.tokenizer import load_tokenizer

# What the gate finds for this pre-tokenizer and the versions pinned here, and some more.
ROUTED = ((0x898, 0x89F), (0x1ACF, 0x1ADD), (0x1AE0, 0x1AEB), (0x20C1, 0x20C1))
TEXTS = [
    *(f"document number {k} has nothing special" for k in range(40)),
    "a word with a\u1acfb inside",
    "a\u0898\u0301b and e\u0301, which NFC makes one",
    "caf\u00e9 is as NFC has it",
    "cafe\u0301 is not",
    "a sign \u20c1 of money",
]


@pytest.mark.parametrize(("form", "by_hf"), [(None, 3), ("NFC", 4)])
def test_the_dataset_is_the_references_and_says_how_many_documents_were_its(
    tiny_tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    form: str | None,
    by_hf: int,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    normalizer = None if form is None else {"type": form}
    made = variant_of(
        tiny_tokenizer.read_bytes(), pre_tokenizer=SPLITS["deepseek"], normalizer=normalizer
    )
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(made)
    spec = load_tokenizer(tokenizer)
    remember(Proof(routed=ROUTED), "gigatoken", spec, "plain")
    text = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    fast = make_dataset([text], tokenizer, tmp_path / "fast", encoder="gigatoken")
    slow = make_dataset([text], tokenizer, tmp_path / "slow", encoder="hf")
    assert fast.manifest.digest == slow.manifest.digest
    one, other = (digests(tmp_path / name) for name in ("fast", "slow"))
    assert {k: v for k, v in one.items() if "shard" in k} == {
        k: v for k, v in other.items() if "shard" in k
    }
    dataset = Dataset.open(str(tmp_path / "fast"))
    for k, document in enumerate(TEXTS):
        assert dataset.document(k).tokens[:-1].tolist() == spec.encode(document)
    said, plain = RunResult.of(fast), RunResult.of(slow)
    assert said.encoder is not None
    assert "proved on every code point" in said.encoder.claim
    assert "hold one of 36 code points (U+0898" in said.encoder.reasons
    assert ("change under NFC" in said.encoder.reasons) == (form is not None)
    assert plain.encoder is not None
    assert "proved" not in plain.encoder.claim
    assert (said.by_reference, plain.by_reference) == (by_hf, 0)


@pytest.mark.parametrize("number", [1, 10, 100])
def test_a_short_run_is_audited_too(tiny_tokenizer: Path, number: int) -> None:
    from olm_data.encoders import TextEncoder
    from olm_data.encoders.hf import HfEncoder
    from olm_data.errors import ValidationError

    spec = load_tokenizer(tiny_tokenizer)

    class Wrong(HfEncoder):
        def encode(self, data, offsets):  # type: ignore[no-untyped-def]
            ids, ends = super().encode(data, offsets)
            ids = ids.copy()
            ids[ends[number] - 1] += 1
            return ids, ends

    run = TextEncoder(Wrong(spec, "plain"), spec, "plain", lambda: HfEncoder(spec, "plain"))
    with pytest.raises(ValidationError, match="disagrees with the reference") as caught:
        run.encode(*concatenate(b"text" for _ in range(120)), where="row {}".format)
    assert f"row {number - 1}" in str(caught.value)
