"""Searching: every document that holds the string is found, once, at its first place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.extensions.show import documents as peek_find
from olm_data.extensions.show.documents import Hit, find_id, find_text
from olm_data.extensions.show.token_text import token_bytes, token_texts
from olm_data.tokenizer.tokenizer import TokenizerSpec

DOCUMENTS = [*texts(30), "aaaaaaaaaab", "ab" * 40, "\u4f60\u597d" * 9, "x", "a", "b"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Dataset:
    folder = tmp_path_factory.mktemp("find")
    source = write_jsonl(folder / "a.jsonl", DOCUMENTS)
    words = {"bos": "<|endoftext|>", "id_column": "id"}
    make_dataset([source], tiny_tokenizer, folder / "out", shard_tokens=200, **words)
    return Dataset.open(str(folder / "out"))


@pytest.fixture(scope="module")
def spec(dataset: Dataset) -> TokenizerSpec:
    return dataset.tokenizer


pieces = st.sampled_from(DOCUMENTS).flatmap(
    lambda text: st.tuples(st.integers(0, len(text) - 1), st.integers(1, 30)).map(
        lambda span: text[span[0] : span[0] + span[1]]
    )
)


@pytest.mark.parametrize(("piece", "limit"), [(1 << 20, 30), (7, 6)])
def test_all_documents_that_hold_a_string_are_found_whatever_the_pieces(
    piece: int,
    limit: int,
    dataset: Dataset,
    spec: TokenizerSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peek_find, "PIECE_TOKENS", piece)

    @settings(max_examples=25)
    @given(pieces)
    def check(text: str) -> None:
        text = text[:limit].encode()[:limit].decode(errors="ignore") or "a"
        hits = find_text(dataset, text, most=1000)
        assert [hit.document for hit in hits] == [
            n for n, document in enumerate(DOCUMENTS) if text in document
        ]
        for hit in hits:
            tokens = dataset.document(hit.document).tokens
            assert text in spec.decode(tokens[hit.start : hit.stop])
            before = spec.decode(tokens[1 : hit.stop - 1])
            assert text not in before  # the first place, and no token too many

    check()


def test_a_search_ends_when_it_has_enough_and_tells_how_far_it_is(dataset: Dataset) -> None:
    seen: list[tuple[int, int]] = []
    hits = find_text(dataset, "fox", most=2, watch=lambda *n: seen.append(n))
    assert len(hits) == 2
    assert 0 < seen[-1][0] < seen[-1][1] == len(DOCUMENTS)


def test_neither_ends_of_documents_nor_neighbours_are_text(dataset: Dataset) -> None:
    found = find_text(dataset, "<|endoftext|>", most=100)
    assert [hit.document for hit in found] == [
        n for n, text in enumerate(DOCUMENTS) if "<|endoftext|>" in text
    ]
    assert [hit.document for hit in find_text(dataset, "xa", most=9)] == []


def test_ids_are_found_in_every_shard(dataset: Dataset) -> None:
    for number in (0, 17, len(DOCUMENTS) - 1):
        assert find_id(dataset, f"a-{number}", most=5) == [Hit(number)]
    assert find_id(dataset, "nobody", most=5) == []


def test_other_tokenizers_are_searched_by_their_decoded_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {"[U]": 0, "red": 1, "fox": 2, "runs": 3, "<eos>": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[U]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = write_jsonl(tmp_path / "a.jsonl", ["red fox", "fox runs fox runs", "red"])
    make_dataset([source], tmp_path / "tokenizer.json", tmp_path / "out")
    dataset = Dataset.open(str(tmp_path / "out"))
    spec = dataset.tokenizer
    assert token_bytes(spec) is None
    assert find_text(dataset, "fox r", most=5) == [Hit(1, 0, 2)]
    assert find_text(dataset, "red", most=5) == [Hit(0, 0, 1), Hit(2, 0, 1)]
    assert "".join(token_texts(spec, [2, 3, 2], None)) == "fox runs fox"
