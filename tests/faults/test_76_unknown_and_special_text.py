"""Row 76: unknown characters and spelled special tokens, for any model type, end no run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.tokenizer_kinds import unigram, word_piece
from support.tokenizing import make_dataset, make_request, tokenized, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError
from olm_data.extensions.verify.datasets import verify
from olm_data.tokenization.summary import RunResult

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


def test_unknown_characters_are_counted_and_special_text_stays_text(
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


def test_documents_with_unknown_characters_are_left_out_if_asked(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(unigram())
    text = write_jsonl(tmp_path / "in.jsonl", LOWER)
    done = make_dataset([text], path, tmp_path / "out", eos="</s>", on_unknown="drop")
    assert done.manifest.dropped == {"unknown": 1}
    assert tokenized(done).on_unknown == "drop"
    assert kept(tmp_path / "out") == [0, 2, 3]
    assert done.inputs["in.jsonl"].unknown_tokens == 0


def test_documents_the_model_cannot_encode_are_dropped_by_reason_into_the_quarantine(
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


def test_a_batch_of_nothing_but_documents_that_cannot_be_encoded(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(unigram(unk=False))
    text = write_jsonl(tmp_path / "in.jsonl", ["\u6f22 </s>", "\u5b57"])
    other = write_jsonl(tmp_path / "known.jsonl", ["the cat"])
    done = make_dataset([text, other], path, tmp_path / "out", eos="</s>", max_bad="2")
    assert (done.manifest.totals.documents, done.manifest.dropped) == (1, {"unencodable": 2})
    assert done.total("special_hits") == 1


def test_the_account_of_a_tokenizer_that_knows_everything_is_as_before(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    text = write_jsonl(tmp_path / "in.jsonl", LOWER)
    make_dataset([text], tiny_tokenizer, tmp_path / "out")
    record = json.loads((tmp_path / "out" / "shard-00000.json").read_bytes())
    assert not {"unknown_tokens", "unknown_documents"} & set(record["units"][0])
