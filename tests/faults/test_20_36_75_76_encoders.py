"""FAULTS rows 20, 36, 75, 76: encoders that panic, disagree, or meet what they do not know."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from support.tokenizer_kinds import SPLITS, unigram, variant_of, word_piece
from support.tokenizing import digests, make_dataset, make_request, tokenized, write_jsonl

import olm_data.encoders as encoders
from olm_data.dataset.dataset import Dataset
from olm_data.encoders import TextEncoder, choose_encoder, gate, make_encoder
from olm_data.encoders.base import AUDIT_EVERY, Unencodable, concatenate
from olm_data.encoders.code_points import Proof, remember
from olm_data.encoders.hf import HfEncoder
from olm_data.errors import InputError, ValidationError
from olm_data.extensions.verify.datasets import verify
from olm_data.tokenization.summary import RunResult
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer


@pytest.mark.parametrize(
    ("encoder", "character"),
    [("hf", "a"), ("gigatoken", "a"), ("gigatoken", " "), ("gigatoken", "\u4f60")],
)
def test_20_time_grows_with_the_text_and_not_with_its_square(
    encoder: str, character: str, tiny_tokenizer: Path
) -> None:
    encode = make_encoder(encoder, load_tokenizer(tiny_tokenizer), "plain").encode

    def seconds(size: int) -> float:
        """Less of two: of this process only, so that others do not count."""
        buffers = concatenate([(character * (size // len(character.encode()))).encode()])
        took = []
        for _ in range(2):
            start = time.process_time()
            encode(*buffers)
            took.append(time.process_time() - start)
        return min(took)

    seconds(1000)
    # Doubled three times, as caches and a busy machine make one as slow as two: linear is 8,
    # quadratic 64. A hundredth of a second is the clock's.
    assert seconds(2_000_000) < 24 * seconds(250_000) + 0.01


@pytest.mark.parametrize("character", ["a", " ", "\n", "1", "!", "\u0301"])
def test_20_a_megabyte_of_one_character_encodes_and_decodes_back(
    tiny_tokenizer: Path, character: str
) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    text = character * (1_000_000 // len(character.encode()))
    buffers = concatenate([text.encode()])
    one, other = (
        make_encoder(name, spec, "plain").encode(*buffers) for name in ("hf", "gigatoken")
    )
    assert np.array_equal(one.ids, other.ids)
    assert spec.decode(one.ids) == text


class PanicException(BaseException):
    """What a Rust panic is in Python: no `Exception`."""


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (PanicException("index out of bounds"), Unencodable),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["panic", "interrupt"],
)
def test_20_a_panic_is_a_document_that_cannot_be_encoded_and_an_interrupt_is_no_panic(
    raised: BaseException,
    expected: type[BaseException],
    tiny_tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Raising:
        pre_tokenizer = None

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> None:
            raise raised

    encoder = HfEncoder(load_tokenizer(tiny_tokenizer), "plain")
    monkeypatch.setattr(encoder, "_tokenizer", Raising())
    with pytest.raises(expected, match=str(raised) or "^$"):
        encoder.encode(*concatenate([b"text"]))


SAMPLE = concatenate(f"document {k}".encode() for k in range(100))


@pytest.fixture(scope="module")
def spec(tiny_tokenizer: Path) -> TokenizerSpec:
    return load_tokenizer(tiny_tokenizer)


@pytest.fixture
def small_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of few code points, and a cache of its own: the encoders here are not real."""
    monkeypatch.setattr(gate, "NEAR", [range(0x20, 0x180)])
    monkeypatch.setattr(gate, "FAR", [range(0x40000, 0x40040)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


gated = pytest.mark.usefixtures("small_gate")


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


@gated
def test_36_auto_falls_back_to_the_reference_and_says_so(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(encoders.ENCODERS, "gigatoken", OneWrong)
    report = choose_encoder("auto", spec, "plain", SAMPLE)
    assert report.encoder == "hf"
    assert "gigatoken is not used with this tokenizer" in report.note
    assert "document 57" in report.note
    assert report.claim == "the reference: gigatoken failed the gate"


@gated
def test_36_an_encoder_asked_for_by_name_that_fails_the_gate_is_an_error(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(encoders.ENCODERS, "gigatoken", OneWrong)
    with pytest.raises(ValidationError, match="other ids than the reference"):
        choose_encoder("gigatoken", spec, "plain", SAMPLE)


@gated
@pytest.mark.parametrize("text", ["caf\u00e9 cafe\u0301", "a" * 10_000, "\x00", "<|endoftext|>"])
def test_36_the_gate_knows_texts_on_which_encoders_have_differed(
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


@gated
def test_36_lost_and_doubled_tokens_and_moved_ends_are_found(
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


@gated
def test_36_every_ten_thousandth_document_is_audited_across_batches(spec: TokenizerSpec) -> None:
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


# What the gate finds for this pre-tokenizer and the versions pinned here, and some more.
ROUTED = ((0x898, 0x89F), (0x1ACF, 0x1ADD), (0x1AE0, 0x1AEB), (0x20C1, 0x20C1))


ROUTED_TEXTS = [
    *(f"document number {k} has nothing special" for k in range(40)),
    "a word with a\u1acfb inside",
    "a\u0898\u0301b and e\u0301, which NFC makes one",
    "caf\u00e9 is as NFC has it",
    "cafe\u0301 is not",
    "a sign \u20c1 of money",
]


@pytest.mark.parametrize(("form", "by_hf"), [(None, 3), ("NFC", 4)])
def test_75_the_dataset_is_the_references_and_says_how_many_documents_were_its(
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
    text = write_jsonl(tmp_path / "in.jsonl", ROUTED_TEXTS)
    fast = make_dataset([text], tokenizer, tmp_path / "fast", encoder="gigatoken")
    slow = make_dataset([text], tokenizer, tmp_path / "slow", encoder="hf")
    assert fast.manifest.digest == slow.manifest.digest
    one, other = (digests(tmp_path / name) for name in ("fast", "slow"))
    assert {k: v for k, v in one.items() if "shard" in k} == {
        k: v for k, v in other.items() if "shard" in k
    }
    dataset = Dataset.open(str(tmp_path / "fast"))
    for k, document in enumerate(ROUTED_TEXTS):
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
def test_75_a_short_run_is_audited_too(tiny_tokenizer: Path, number: int) -> None:
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


LOWER = ["the cat", "the \u6f22\u5b57 cat", "ends </s> here", "on the mat"]


TEXTS = ["the cat", "the \u6f22\u5b57 cat", "ends </s> here [SEP]", "on the mat"]


def kept(folder: Path) -> list[int]:
    dataset = Dataset.open(str(folder))
    positions = [dataset.origin(k).position for k in range(dataset.documents)]
    lines = [0]
    for text in LOWER:
        lines.append(lines[-1] + len(json.dumps({"id": f"in-{len(lines) - 1}", "text": text})) + 1)
    return [lines.index(position) for position in positions]


@pytest.fixture(params=[("</s>", unigram), ("[SEP]", word_piece)], ids=["unigram", "word piece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    eos, make = request.param
    path = tmp_path / "tokenizer.json"
    path.write_bytes(make())
    return path, eos


def test_76_unknown_characters_are_counted_and_special_text_stays_text(
    tokenizer: tuple[Path, str], tmp_path: Path
) -> None:
    path, eos = tokenizer
    text = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    done = make_dataset([text], path, tmp_path / "out", eos=eos, encoder="auto")
    dataset = Dataset.open(str(tmp_path / "out"))
    request = make_request([text], path, eos=eos)
    for k in range(len(TEXTS)):
        tokens = dataset.document(k).tokens
        assert np.flatnonzero(tokens == request.tokenizer.eos).tolist() == [len(tokens) - 1]
    account = done.inputs["in.jsonl"]
    stored = sum(int((dataset.document(k).tokens == request.tokenizer.unk).sum()) for k in range(4))
    assert account.unknown_tokens == stored > 0
    assert account.unknown_documents >= 1
    result = RunResult.of(done)
    assert (result.unknown_tokens, result.unknown_documents) == (stored, account.unknown_documents)
    assert any("--on-unknown drop" in note for note in result.notes)
    assert verify(str(tmp_path / "out")).ok


def test_76_documents_with_unknown_characters_are_left_out_if_asked(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(unigram())
    text = write_jsonl(tmp_path / "in.jsonl", LOWER)
    done = make_dataset([text], path, tmp_path / "out", eos="</s>", on_unknown="drop")
    assert done.manifest.dropped == {"unknown": 1}
    assert tokenized(done).on_unknown == "drop"
    assert kept(tmp_path / "out") == [0, 2, 3]
    assert done.inputs["in.jsonl"].unknown_tokens == 0


def test_76_documents_the_model_cannot_encode_are_dropped_by_reason_into_the_quarantine(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(unigram(unk=False))
    text = write_jsonl(tmp_path / "in.jsonl", LOWER)
    done = make_dataset([text], path, tmp_path / "out", eos="</s>", max_bad="1")
    assert done.manifest.dropped == {"unencodable": 1}
    assert kept(tmp_path / "out") == [0, 2, 3]
    assert list((tmp_path / "out" / "quarantine").iterdir())
    with pytest.raises(InputError, match="bad"):
        make_dataset([text], path, tmp_path / "two", eos="</s>", max_bad="0")


def test_76_a_batch_of_nothing_but_documents_that_cannot_be_encoded(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(unigram(unk=False))
    text = write_jsonl(tmp_path / "in.jsonl", ["\u6f22 </s>", "\u5b57"])
    other = write_jsonl(tmp_path / "known.jsonl", ["the cat"])
    done = make_dataset([text, other], path, tmp_path / "out", eos="</s>", max_bad="2")
    assert (done.manifest.totals.documents, done.manifest.dropped) == (1, {"unencodable": 2})
    assert done.total("special_hits") == 1


def test_76_the_account_of_a_tokenizer_that_knows_everything_is_as_before(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    text = write_jsonl(tmp_path / "in.jsonl", LOWER)
    make_dataset([text], tiny_tokenizer, tmp_path / "out")
    record = json.loads((tmp_path / "out" / "shard-00000.json").read_bytes())
    assert not {"unknown_tokens", "unknown_documents"} & set(record["units"][0])
