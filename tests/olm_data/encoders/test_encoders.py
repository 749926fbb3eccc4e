"""Encoders: buffers in and out, one rule for special tokens, whichever library or class works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.encoding import NAMES, encoded, rows, spec_of
from support.texts import write_texts
from support.tokenizer_kinds import bpe
from support.tokenizing import digests

from olm_data.encoders import (
    SMALL_TEXT,
    TextEncoder,
    choose_encoder,
    find_encoder,
    gate,
    likely_encoder,
    make_encoder,
    own,
)
from olm_data.encoders.base import (
    SCAN_BYTES,
    Ids,
    Scanner,
    Unencodable,
    chosen_of,
    concatenate,
    count_ids,
    ids_of,
    lost_characters,
    merged,
)
from olm_data.encoders.hf import HfEncoder
from olm_data.encoders.own import OwnEncoder
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer, spec_from_bytes
from olm_data.verbs import tokenize


@pytest.mark.parametrize("name", NAMES)
def test_each_document_gets_the_ids_of_the_reference_library(
    spec: TokenizerSpec, name: str
) -> None:
    texts = ["hello world", "", "caf\u00e9\r\n", " " * 50, "x" * 3000, "\x00", "\U0001f600"]
    encoded = make_encoder(name, spec, "plain").encode(*concatenate(t.encode() for t in texts))
    assert (encoded.ids.dtype, encoded.offsets.dtype) == (np.uint32, np.int64)
    assert encoded.offsets[0] == 0
    assert rows(encoded) == [spec.encode(text) for text in texts]


@pytest.mark.parametrize("name", NAMES)
def test_no_documents_give_no_ids(spec: TokenizerSpec, name: str) -> None:
    encoded = make_encoder(name, spec, "plain").encode(*concatenate([]))
    assert (len(encoded.ids), encoded.offsets.tolist(), encoded.special_hits) == (0, [0], 0)


@settings(max_examples=50)
@given(texts=st.lists(st.text(max_size=200), max_size=8))
def test_both_encoders_agree_on_any_text_and_it_decodes_back(
    spec: TokenizerSpec, texts: list[str]
) -> None:
    buffers = concatenate(text.encode() for text in texts)
    one, other = (make_encoder(name, spec, "plain").encode(*buffers) for name in NAMES)
    assert rows(one) == rows(other)
    assert [spec.decode(row) for row in rows(one)] == texts


def test_auto_takes_the_fast_encoder_after_comparing_it(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gate, "NEAR", [range(0x20, 0x3000)])
    monkeypatch.setattr(gate, "FAR", ())
    report = choose_encoder("auto", spec, "plain", concatenate([b"some text"] * 50))
    assert report.encoder == "gigatoken"
    assert "every code point" in report.claim
    assert report.note == ""


def test_auto_without_the_fast_library_says_so(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_data.encoders.find_spec", lambda name: None)
    report = find_encoder("auto", spec, "plain", SMALL_TEXT, [])
    assert report.encoder == "hf"
    assert "pip install 'olm-data[fast]'" in report.note
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    with pytest.raises(UsageError, match=r"olm-data\[fast\]"):
        choose_encoder("gigatoken", spec, "plain", concatenate([]))


def test_a_tokenizer_the_fast_library_cannot_load_falls_back_and_says_so(
    spec: TokenizerSpec,
) -> None:
    model = json.loads(spec.json_bytes)
    vocab = {token: k for k, token in enumerate(["<|endoftext|>", "[UNK]", "a", "##b"])}
    model |= {
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": None,
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }
    other = spec_from_bytes(json.dumps(model).encode(), name="pieces")
    report = choose_encoder("auto", other, "plain", concatenate([]))
    assert report.encoder == "hf"
    assert "cannot load the tokenizer pieces" in report.note
    with pytest.raises(UsageError, match="cannot load"):
        choose_encoder("gigatoken", other, "plain", concatenate([]))
    # The unknown token is a special token of many files, and what text may become all the same.
    encoded = make_encoder("hf", other, "plain").encode(*concatenate([b"ab zzz"]))
    assert encoded.ids.tolist() == [2, 3, 1]


def test_an_encoder_that_does_not_exist_is_refused(spec: TokenizerSpec) -> None:
    with pytest.raises(UsageError, match="did you mean 'gigatoken'"):
        choose_encoder("gigatokens", spec, "plain", concatenate([]))


def test_no_encoder_library_is_imported_before_an_encoder_is_made() -> None:
    code = (
        "import olm_data.encoders, olm_data.tokenizer.tokenizer, sys;"
        "print([m for m in ('tokenizers', 'gigatoken', 'awkward', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "dolma2", "gpt-neox-dolma"])
@pytest.mark.parametrize("special", ["plain", "allow"])
def test_the_gate_passes_for_real_tokenizers(shared_data: Path, name: str, special: str) -> None:
    spec = load_tokenizer(shared_data / "tokenizers" / name)
    text = (shared_data / "corpora/books-novels/tinyshakespeare.txt").read_bytes()[:100_000]
    report = choose_encoder("auto", spec, special, concatenate([text]))  # type: ignore[arg-type]
    assert (report.encoder, report.note) == ("gigatoken", "")


ROWS = st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=8)


def buffers(rows: list[list[int]]) -> Ids:
    ids = np.array([i for row in rows for i in row], np.uint32)
    return ids, np.cumsum([0, *map(len, rows)])


def rows_of(made: Ids) -> list[list[int]]:
    return [ids_of(made, k).tolist() for k in range(len(made[1]) - 1)]


@given(ROWS, st.data())
def test_a_batch_that_is_parted_is_whole_again_when_it_is_merged(
    rows: list[list[int]], data: st.DataObject
) -> None:
    flags = st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))
    chosen = np.array(data.draw(flags), dtype=bool)
    made = buffers(rows)
    one, other = chosen_of(made, chosen), chosen_of(made, ~chosen)
    assert rows_of(one) == [row for row, taken in zip(rows, chosen, strict=True) if taken]
    assert rows_of(merged(chosen, one, other)) == rows


@given(ROWS, st.sets(st.integers(0, 9)))
def test_ids_are_counted_document_by_document(rows: list[list[int]], wanted: set[int]) -> None:
    counts = count_ids(buffers(rows), np.array(sorted(wanted), np.uint32))
    assert counts.tolist() == [sum(i in wanted for i in row) for row in rows]


@given(st.lists(st.binary(max_size=5)))
def test_documents_are_one_after_another_in_their_buffer(texts: list[bytes]) -> None:
    data, offsets = concatenate(texts)
    assert data.tobytes() == b"".join(texts)
    assert offsets.tolist() == np.cumsum([0, *map(len, texts)]).tolist()


# Strings in text that spell a special token: found wherever they lie.
@given(
    texts=st.lists(st.text("<|eos>a", max_size=12), max_size=6),
    tokens=st.sets(st.sampled_from(["<|e|>", "<|eos|>", "<s>", "<|", "<|e|><|"]), min_size=1),
)
def test_hits_are_what_searching_each_document_finds(texts: list[str], tokens: set[str]) -> None:
    found = Scanner(tokens).hits(*concatenate(text.encode() for text in texts))
    by_prefix: dict[str, list[str]] = {}
    for token in tokens:
        by_prefix.setdefault(token[:2], []).append(token)
    wanted = []
    for group in by_prefix.values():
        pattern = "|".join(re.escape(t) for t in sorted(group, key=len, reverse=True))
        for k, text in enumerate(texts):
            wanted += [(k, hit) for hit in re.findall(pattern, text)]
    assert sorted(found) == sorted(wanted)


@pytest.mark.parametrize(
    "place", [0, 1, SCAN_BYTES - 2, SCAN_BYTES - 1, SCAN_BYTES, 3 * SCAN_BYTES]
)
@pytest.mark.parametrize("token", ["<|x|>", "\u00a0", "~"])
def test_a_special_token_is_found_wherever_it_lies(token: str, place: int) -> None:
    text = b"<" * place + token.encode() + b"|" * (2 * SCAN_BYTES - 1)
    assert Scanner([token]).hits(*concatenate([text])) == [(0, token)]


# Characters that a BPE model leaves out in silence are counted.
def lost(text: str, spec: TokenizerSpec) -> int:
    return int(encoded(spec, text).unknown[0])


def test_characters_that_a_bpe_without_unknown_token_leaves_out_are_counted() -> None:
    spec = spec_of(bpe(unk=False))
    assert lost("the cat", spec) == 0
    assert lost("the \u6f22 cat \u6f22\U0001f642", spec) == 3
    some = json.loads(bpe(unk=False, byte_fallback=True, all_bytes=False))
    assert lost("\u6f22", spec_of(json.dumps(some).encode())) == 1  # one of its bytes is missing
    whole = spec_of(bpe(unk=False, byte_fallback=True))
    assert lost("\u6f22\U0001f642", whole) == 0


@given(st.text(max_size=30))
@settings(max_examples=60)
def test_as_many_are_counted_as_the_library_leaves_out(text: str) -> None:
    """Without merges a token is a letter: what has no token was left out."""
    spec = spec_of(bpe(unk=False, merges=False))
    text = text.encode(errors="replace").decode()
    normal = spec.reference.normalizer.normalize_str(text)
    made = encoded(spec, text)
    if "<" not in text:  # a spelled special is encoded in pieces
        assert len(normal) - len(made.ids) == made.unknown[0]


def test_a_byte_level_vocabulary_with_a_hole_counts_what_falls_through_it() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: number for number, letter in enumerate(sorted(letters))}
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def made(vocabulary: dict[str, int]) -> TokenizerSpec:
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = split
        tokenizer.add_special_tokens(["</s>"])
        return spec_of(tokenizer.to_str().encode())

    assert lost_characters(made(vocabulary)) is None
    hole = split.pre_tokenize_str("e")[0][0]
    holed = made({letter: n for letter, n in vocabulary.items() if letter != hole})
    assert lost("the sea", holed) == 2


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_in_text_follow_the_policy(spec: TokenizerSpec, name: str) -> None:
    texts = ["a<|endoftext|>b<|endoftext|>", "none", "<|endoftext", "|>"]
    buffers = concatenate(text.encode() for text in texts)
    plain = make_encoder(name, spec, "plain").encode(*buffers)
    assert plain.special_hits == 2
    assert spec.eos not in plain.ids
    assert [spec.decode(row) for row in rows(plain)] == texts
    allowed = make_encoder(name, spec, "allow").encode(*buffers)
    assert rows(allowed)[0].count(spec.eos) == 2
    assert rows(allowed)[1:] == rows(plain)[1:]
    with pytest.raises(InputError, match=r"special token <\|endoftext\|>") as caught:
        make_encoder(name, spec, "error").encode(*buffers, where=lambda k: f"line {k}")
    assert "line 0" in str(caught.value)


def test_an_end_token_the_file_forgot_to_mark_special_is_plain_in_text_too(
    spec: TokenizerSpec,
) -> None:
    model = json.loads(spec.json_bytes)
    model["added_tokens"][0]["special"] = False
    other = spec_from_bytes(json.dumps(model).encode(), name="t", eos="<|endoftext|>")
    for name in NAMES:
        encoded = make_encoder(name, other, "plain").encode(*concatenate([b"a<|endoftext|>b"]))
        assert other.eos not in encoded.ids
        assert encoded.special_hits == 1


def test_what_an_encoder_makes_a_special_token_of_is_given_to_the_reference(
    spec: TokenizerSpec,
) -> None:
    class Leaky:
        name = "leaky"

        def encode(self, data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return np.array([5, spec.eos, 7], np.uint32), np.array([0, 3])

    buffers = concatenate([b"abc"])
    made = TextEncoder(Leaky(), spec, "plain", lambda: HfEncoder(spec, "plain")).encode(*buffers)
    assert (rows(made), made.by_reference) == ([spec.encode("abc")], 1)
    assert rows(TextEncoder(Leaky(), spec, "allow").encode(*buffers)) == [[5, spec.eos, 7]]


MODULE = "support.own_text"


@pytest.mark.slow
def test_a_dataset_it_made_is_the_one_that_ours_make(tmp_path: Path, tiny_tokenizer: Path) -> None:
    write_texts(tmp_path / "text", [20, 30])
    for name in ("hf", f"{MODULE}:Slow"):
        place = tmp_path / name.rpartition(":")[2]
        made = tokenize(
            tmp_path / "text", tokenizer=tiny_tokenizer, output=place, encoder=name, workers=2
        )
    assert made.manifest.tools.encoder == f"{MODULE}:Slow"
    one, other = digests(tmp_path / "hf"), digests(tmp_path / "Slow")
    assert {k: v for k, v in one.items() if "shard" in k} == {
        k: v for k, v in other.items() if "shard" in k
    }
    assert made.digest


@pytest.mark.slow
def test_one_that_gives_other_ids_is_refused(spec: TokenizerSpec) -> None:
    sample = concatenate([b"some text"])
    with pytest.raises(ValidationError, match="gives other ids than the reference"):
        choose_encoder(f"{MODULE}:Wrong", spec, "plain", sample)


def test_a_package_gives_it_a_short_name(
    spec: TokenizerSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {(own.GROUP, "backwards"): f"{MODULE}:Wrong"}
    monkeypatch.setattr(own, "path_of", lambda group, name: names.get((group, name)))
    assert likely_encoder("backwards") == f"{MODULE}:Wrong"
    made = make_encoder(f"{MODULE}:Slow", spec, "plain").encode(*concatenate([b"some x"]))
    assert made.ids.tolist() == spec.encode("some x")
    with pytest.raises(UsageError, match="no encoder 'forwards'"):
        choose_encoder("forwards", spec, "plain", concatenate([b"x"]))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (f"{MODULE}:Plain", "not a subclass of OwnEncoder"),
        (f"{MODULE}:Nothing", "has no class Nothing"),
        ("olm_data.encoders.own:OwnEncoder", "has no method ids"),
        ("no_such_lab.parts:X", "no module no_such_lab"),
    ],
)
def test_what_is_none_is_said(path: str, said: str, spec: TokenizerSpec) -> None:
    with pytest.raises(UsageError, match=said):
        choose_encoder(path, spec, "plain", concatenate([b"x"]))


def test_texts_it_cannot_encode_are_named(spec: TokenizerSpec) -> None:
    class Picky(OwnEncoder):
        def ids(self, text: str) -> list[int]:
            if "q" in text:
                raise ValueError("no q")
            return [len(text)]

    made = Picky(spec, "plain")
    ids, ends = made.encode(*concatenate([b"a", b"bcd", b""]))
    assert (ids.tolist(), ends.tolist(), ids.dtype) == ([1, 3, 0], [0, 1, 2, 3], np.uint32)
    with pytest.raises(Unencodable) as caught:
        made.encode(*concatenate([b"a", b"q"]))
    assert caught.value.why == {1: "no q"}
