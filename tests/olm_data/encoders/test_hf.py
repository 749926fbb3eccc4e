"""The reference encoder, for every model type; long documents in pieces, to the same ids."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command import WITH_TESTS, environment
from support.encoding import encoded, rows, spec_of
from support.tokenizer_kinds import added, bpe, unigram, variant_of, word_level, word_piece

from olm_data.encoders import hf, make_encoder
from olm_data.encoders.base import concatenate, special_ids
from olm_data.encoders.hf import pieces
from olm_data.errors import InputError
from olm_data.tokenizer.tokenizer import TokenizerSpec, spec_from_bytes

KINDS: dict[str, Callable[[], bytes]] = {
    "unigram": unigram,
    "unigram bytes": partial(unigram, byte_fallback=True),
    "unigram without unk": partial(unigram, unk=False),
    "word piece": word_piece,
    "word piece of words": partial(word_piece, split="WhitespaceSplit"),
    "word level": word_level,
    "bpe": bpe,
    "bpe without unk": partial(bpe, unk=False),
    "bpe bytes": partial(bpe, byte_fallback=True),
    "bpe some bytes": partial(bpe, byte_fallback=True, all_bytes=False),
    "characters": partial(bpe, merges=False),
}


KNOWN = "the cat sat on the mat"


@pytest.fixture(scope="module", params=KINDS)
def kind_spec(request: pytest.FixtureRequest) -> TokenizerSpec:
    return spec_of(KINDS[request.param]())


def test_known_text_is_encoded_as_the_library_does(kind_spec: TokenizerSpec) -> None:
    spec = kind_spec
    from tokenizers import Tokenizer

    library = Tokenizer.from_str(spec.json_bytes.decode())
    library.no_truncation()
    wanted = library.encode(KNOWN, add_special_tokens=False).ids
    made = encoded(spec, KNOWN, "the")
    assert rows(made)[0] == wanted
    assert len(wanted) > 3
    assert (made.unknown.tolist(), made.failed) == ([0, 0], {})


@settings(max_examples=30)
@given(
    parts=st.lists(
        st.sampled_from(["</s>", "[SEP]", "<unk>", "[UNK]", "<pad>", "<s>", "\u6f22", " ", "the"])
        | st.text("a <>/s[]SEPunk", max_size=6),
        max_size=8,
    )
)
def test_no_text_becomes_a_special_token(kind_spec: TokenizerSpec, parts: list[str]) -> None:
    spec = kind_spec
    texts = ["".join(parts), " ".join(parts), *parts]
    made = encoded(spec, *texts)
    assert not np.isin(made.ids, special_ids(spec)).any()
    if spec.unk is not None and spec.unk_token in spec.special_tokens:
        assert spec.unk not in special_ids(spec)
    for k, row in enumerate(rows(made)):
        assert bool(row) or not texts[k].strip() or k in made.failed or spec.unk is None


@pytest.mark.parametrize("kind", ["unigram", "unigram bytes", "word piece of words", "word level"])
def test_text_that_spells_the_end_token_follows_the_policy(kind: str) -> None:
    spec = spec_of(KINDS[kind]())
    text = f"the cat {spec.eos_token} sat"
    plain = encoded(spec, text)
    assert plain.special_hits == 1
    assert spec.eos not in plain.ids
    assert (rows(plain)[0][:2], plain.failed) == (rows(encoded(spec, "the cat"))[0][:2], {})
    assert rows(encoded(spec, text, special="allow"))[0].count(spec.eos) == 1
    with pytest.raises(InputError, match="spells the special token"):
        encoded(spec, text, special="error")


def test_text_around_a_spelled_special_token_keeps_its_ids() -> None:
    spec = spec_of(unigram())
    ids = rows(encoded(spec, "the cat sat </s> on the mat"))[0]
    one, other = rows(encoded(spec, "the cat sat", "on the mat"))
    assert (ids[: len(one)], ids[-len(other) :]) == (one, other)
    assert spec.decode(ids) == "the cat sat </s> on the mat"


@pytest.mark.parametrize("kind", ["unigram", "word piece", "word level", "bpe", "characters"])
def test_unknown_characters_become_the_unknown_token_and_are_counted(kind: str) -> None:
    spec = spec_of(KINDS[kind]())
    made = encoded(spec, "the \u6f22 cat", "the cat", "\u6f22 \u6f23")
    assert made.unknown[1] == 0
    assert (made.unknown[[0, 2]] > 0).all()
    assert (made.unknown.sum(), made.failed) == ((made.ids == spec.unk).sum(), {})


def test_bytes_stand_for_unknown_characters_where_the_vocabulary_has_them() -> None:
    for data in (unigram(byte_fallback=True), bpe(byte_fallback=True)):
        spec = spec_of(data)
        made = encoded(spec, "the \u6f22 cat")
        names = [spec.reference.id_to_token(i) for i in rows(made)[0]]
        assert {"<0xE6>", "<0xBC>", "<0xA2>"} <= set(names)
        assert made.unknown.tolist() == [0]
    some = spec_of(bpe(byte_fallback=True, all_bytes=False))  # <0xE6> and others are not there
    assert encoded(some, "\u6f22").unknown.tolist() == [1]


def test_a_document_no_token_stands_for_is_named_and_the_others_are_encoded() -> None:
    spec = spec_of(unigram(unk=False))
    made = encoded(spec, "the cat", "the \u6f22 cat", "on the mat", "\u6f22")
    assert sorted(made.failed) == [1, 3]
    assert "unk_id" in made.failed[1]
    assert rows(made) == [spec.encode("the cat"), [], spec.encode("on the mat"), []]


def test_a_document_whose_unknown_token_is_the_end_token_is_named() -> None:
    model = json.loads(word_level())
    model["model"]["unk_token"] = "</s>"
    spec = spec_of(json.dumps(model).encode())
    made = encoded(spec, "the cat", "the zebra")
    assert made.failed == {1: "it would hold the special token 1"}
    assert rows(made)[1] == []


def test_truncation_padding_and_post_processor_of_the_file_add_and_take_nothing() -> None:
    spec = spec_of(word_piece())
    text = KNOWN * 20
    assert len(rows(encoded(spec, text))[0]) > 100
    assert not np.isin(encoded(spec, text, "the").ids, [0, 2, 3]).any()


def test_added_tokens_that_are_not_special_stay_whole() -> None:
    data = json.loads(unigram())
    tokens = [*data["added_tokens"], added("|||X|||", len(data["model"]["vocab"]), special=False)]
    spec = spec_of(variant_of(json.dumps(data).encode(), added_tokens=tokens))
    for text in ("the |||X||| cat", "the |||X||| </s> cat"):
        assert tokens[-1]["id"] in rows(encoded(spec, text))[0]


def test_a_file_without_a_model_type_or_decoder_loads(tiny_tokenizer: Path) -> None:
    data = json.loads(tiny_tokenizer.read_bytes())
    del data["model"]["type"]
    data["decoder"] = None
    spec = spec_from_bytes(json.dumps(data).encode(), name="t")
    assert rows(encoded(spec, "the <|endoftext|>"))[0] == spec.encode("the <|endoftext|>")


def test_the_merges_of_a_special_token_do_not_make_it() -> None:
    data = json.loads(bpe())
    vocab, merges = data["model"]["vocab"], data["model"]["merges"]
    for pair in (["<", "/"], ["</", "s"], ["</s", ">"]):
        vocab.setdefault("".join(pair), len(vocab))
        merges.append(pair)
    spec = spec_of(json.dumps(data).encode())
    made = encoded(spec, "a</s>b")
    assert spec.eos not in made.ids
    assert vocab["</s"] in made.ids
    assert spec.eos in spec.encode("a</s>b")


def changed(spec: TokenizerSpec, **changes: Any) -> TokenizerSpec:
    return spec_from_bytes(
        json.dumps({**json.loads(spec.json_bytes), **changes}).encode(), name="t"
    )


def text_of(size: int) -> bytes:
    words = (
        "the cat\u00e9 sat 12345 on\n\nthe  mat \u4f60\u597d, isn't it? def f(x):\n    return x\n"
    )
    return (words * (size // len(words.encode()) + 1)).encode()[: size // 2 * 2].rpartition(b" ")[0]


@settings(max_examples=60)
@given(text=st.text("ab \n\t1,\u00e9\u0301", max_size=400), target=st.integers(8, 60))
def test_pieces_join_to_the_text_and_their_ids_to_its_ids(
    spec: TokenizerSpec, text: str, target: int
) -> None:
    data = text.encode()
    cut = list(pieces(memoryview(data), spec.encode, target))
    assert b"".join(cut) == data
    ids = [i for piece in cut for i in spec.encode(piece.decode())]
    assert ids == spec.encode(text)


def test_long_text_is_cut_near_the_target(spec: TokenizerSpec) -> None:
    data = text_of(200_000)
    cut = list(pieces(memoryview(data), spec.encode, 10_000))
    assert len(cut) > 15
    assert max(map(len, cut)) < 12_000


def test_text_without_a_safe_place_stays_whole(spec: TokenizerSpec) -> None:
    assert list(pieces(memoryview(b"a" * 5000), spec.encode, 100)) == [b"a" * 5000]


def test_a_tokenizer_that_sees_the_start_of_its_input_is_never_cut_wrongly(
    spec: TokenizerSpec,
) -> None:
    prefixed = changed(
        spec,
        pre_tokenizer={
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": False,
        },
    )
    text = "some words in a row " * 40
    ids = [
        i
        for piece in pieces(memoryview(text.encode()), prefixed.encode, 64)
        for i in prefixed.encode(piece.decode())
    ]
    assert ids == prefixed.encode(text)


@pytest.mark.parametrize("name", ["hf", "gigatoken"])
def test_a_document_longer_than_the_target_has_the_ids_of_the_whole(
    spec: TokenizerSpec, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "TARGET_BYTES", 5_000)
    texts = [b"short", text_of(60_000), b"", text_of(4_000), text_of(6_000), b"end"]
    ids, offsets = make_encoder(name, spec, "plain").encode(*concatenate(texts))[:2]
    for k, text in enumerate(texts):
        assert ids[offsets[k] : offsets[k + 1]].tolist() == spec.encode(text.decode())


def test_a_tokenizer_without_pre_tokenizer_encodes_documents_whole(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "TARGET_BYTES", 100)
    bare = changed(spec, pre_tokenizer=None, decoder=None)
    text = "ab cd " * 200
    ids = make_encoder("hf", bare, "plain").encode(*concatenate([text.encode()])).ids
    assert ids.tolist() == bare.encode(text)


@pytest.mark.slow
def test_a_long_document_takes_bounded_memory(tmp_path: Path, tiny_tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_bytes(text_of(5_000_000))
    script = f"""
import numpy as np
from support.memory import peak
from olm_data.encoders import make_encoder
from olm_data.tokenizer.tokenizer import load_tokenizer
data = np.fromfile({str(tmp_path / "a.txt")!r}, np.uint8)
encoder = make_encoder("hf", load_tokenizer({str(tiny_tokenizer)!r}), "plain")
encoder.encode(data[:1 << 20], np.array([0, 1 << 20]))
before = peak()
ids = encoder.encode(data, np.array([0, len(data)])).ids
print(peak() - before, len(ids))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(WITH_TESTS),
        capture_output=True,
        text=True,
        check=True,
    )
    grown, tokens = map(int, done.stdout.split())
    assert tokens > 500_000
    # The ids themselves, twice (pieces and their join), and room for what a piece needs; the
    # library alone would want about 100 bytes a token.
    assert grown * 1024 < tokens * 8 + (48 << 20) < tokens * 100
