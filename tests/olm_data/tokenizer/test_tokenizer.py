"""Tokenizers: facts about a file that hold whatever traps it sets."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olm_data.errors import InputError, UsageError
from olm_data.tokenizer.tokenizer import PROBE_TEXTS, load_tokenizer, spec_from_bytes


@pytest.fixture(scope="module")
def plain(tiny_tokenizer: Path) -> dict[str, Any]:
    return json.loads(tiny_tokenizer.read_bytes())


def edited(plain: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps({**plain, **changes}).encode()


def test_a_file_its_folder_and_its_bytes_are_the_same_tokenizer(tiny_tokenizer: Path) -> None:
    one, other = load_tokenizer(tiny_tokenizer), load_tokenizer(tiny_tokenizer.parent)
    assert one.json_bytes == tiny_tokenizer.read_bytes()
    assert (one.sha256, one.probe_sha256) == (other.sha256, other.probe_sha256)
    assert one.eos_token == "<|endoftext|>"
    assert one.bos is None
    assert one.dtype == np.uint16


def test_a_spec_is_a_value_that_travels_to_workers(tiny_tokenizer: Path) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    assert spec.encode("hello") == pickle.loads(pickle.dumps(spec)).encode("hello")
    assert len(pickle.dumps(spec)) < len(spec.json_bytes) + 2000


def test_decode_gives_back_what_encode_was_given(tiny_tokenizer: Path) -> None:
    spec = load_tokenizer(tiny_tokenizer)
    assert spec.lossless
    for text in PROBE_TEXTS:
        assert spec.decode(np.array(spec.encode(text), dtype=np.uint16)) == text


def test_truncation_and_padding_of_the_file_are_ignored(plain: dict[str, Any]) -> None:
    padding = {
        "strategy": {"Fixed": 128},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    truncation = {"max_length": 16, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    spec = spec_from_bytes(edited(plain, padding=padding, truncation=truncation), name="t")
    clean = spec_from_bytes(edited(plain), name="t")
    for text in ("a", "a long text " * 100):
        assert spec.encode(text) == clean.encode(text)


def test_the_vocabulary_is_as_large_as_its_largest_id_where_there_are_holes(
    plain: dict[str, Any],
) -> None:
    token = {**plain["added_tokens"][0], "id": 70_000, "content": "<|far|>"}
    data = edited(plain, added_tokens=[*plain["added_tokens"], token])
    # The library renumbers tokens it does not know, so the vocabulary has to have the hole.
    model = json.loads(data)
    model["model"]["vocab"]["<|far|>"] = 70_000
    spec = spec_from_bytes(json.dumps(model).encode(), name="t")
    assert (spec.vocab_size, spec.dtype) == (70_001, np.uint32)


def test_a_model_without_a_type_loads(plain: dict[str, Any]) -> None:
    model = {k: v for k, v in plain["model"].items() if k != "type"}
    assert spec_from_bytes(edited(plain, model=model), name="t").vocab_size == 512


def test_a_normaliser_that_changes_text_is_reported_as_lossy(plain: dict[str, Any]) -> None:
    assert not spec_from_bytes(edited(plain, normalizer={"type": "NFC"}), name="t").lossless
    assert not spec_from_bytes(edited(plain, normalizer={"type": "Lowercase"}), name="t").lossless


def test_another_normaliser_has_another_probe_digest(plain: dict[str, Any]) -> None:
    one = spec_from_bytes(edited(plain), name="t")
    other = spec_from_bytes(edited(plain, normalizer={"type": "NFD"}), name="t")
    assert one.probe_sha256 != other.probe_sha256


def special(*names: str) -> list[dict[str, Any]]:
    rest = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [{"id": k, "content": n, "special": True, **rest} for k, n in enumerate(names)]


def with_special(plain: dict[str, Any], *names: str) -> bytes:
    """The tiny tokenizer with other special tokens in the first places of its vocabulary."""
    model = json.loads(json.dumps(plain["model"]))
    vocab = {t: i for t, i in model["vocab"].items() if i >= len(names)}
    vocab |= {name: k for k, name in enumerate(names)}
    model["vocab"] = vocab
    gone = {t for t, i in plain["model"]["vocab"].items() if i < len(names)}
    model["merges"] = [m for m in model["merges"] if not gone & {*m, "".join(m)}]
    return edited(plain, model=model, added_tokens=special(*names))


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"])
def test_a_well_known_end_token_is_found(plain: dict[str, Any], name: str) -> None:
    spec = spec_from_bytes(with_special(plain, "<pad>", name), name="t")
    assert (spec.eos, spec.eos_token) == (1, name)


def test_the_config_beside_the_file_decides_the_end_token(
    plain: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes(with_special(plain, "<|endoftext|>", "<|stop|>"))
    for token in ("<|stop|>", {"content": "<|stop|>", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
        assert load_tokenizer(tmp_path).eos_token == "<|stop|>"
    assert load_tokenizer(tmp_path, eos="<|endoftext|>").eos == 0
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InputError, match="not a JSON object"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("names", [("[SEP]", "[CLS]"), ("</s>", "<|endoftext|>")])
def test_an_end_token_that_cannot_be_told_is_asked_for(
    plain: dict[str, Any], names: tuple[str, ...]
) -> None:
    data = with_special(plain, *names)
    with pytest.raises(UsageError) as caught:
        spec_from_bytes(data, name="t")
    assert "--eos" in str(caught.value)
    assert names[0] in str(caught.value)
    assert spec_from_bytes(data, name="t", eos="none").eos is None
    assert spec_from_bytes(data, name="t", eos=names[0], bos=names[1]).bos == 1


def test_a_token_that_is_not_there_is_refused_with_a_near_miss(tiny_tokenizer: Path) -> None:
    with pytest.raises(UsageError, match=r"did you mean '<\|endoftext\|>'"):
        load_tokenizer(tiny_tokenizer, eos="<|endoftxt|>")


def test_what_is_no_tokenizer_is_refused(tmp_path: Path, tiny_tokenizer: Path) -> None:
    broken = tmp_path / "broken.json"
    for data in (b"", b"{}", b"\xff", tiny_tokenizer.read_bytes()[:-100]):
        broken.write_bytes(data)
        with pytest.raises(InputError):
            load_tokenizer(broken)
    with pytest.raises(UsageError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="no tokenizer here"):
        load_tokenizer(tmp_path / "missing.json")


def test_names_do_not_depend_on_the_machine(here: Path, tiny_tokenizer: Path) -> None:
    (here / "mine").mkdir()
    for name in ("mine/tokenizer.json", "other.json", "tokenizer.json"):
        (here / name).write_bytes(tiny_tokenizer.read_bytes())
    names = ["mine", "mine/tokenizer.json", "other.json", "tokenizer.json"]
    assert [load_tokenizer(n).name for n in names] == ["mine", "mine", "other", "tokenizer"]


REAL = {
    "gpt2": (50257, 50256, True),
    "dolma2": (100278, 100257, True),
    "gpt-neox-dolma": (50280, 50279, False),
}


@pytest.mark.parametrize(("name", "facts"), REAL.items())
def test_real_files_have_their_known_facts(shared_data: Path, name: str, facts: Any) -> None:
    spec = load_tokenizer(shared_data / "tokenizers" / name)
    assert (spec.vocab_size, spec.eos, spec.lossless) == facts
    assert spec.dtype == (np.uint32 if name == "dolma2" else np.uint16)


def test_bert_has_no_end_of_document(shared_data: Path) -> None:
    folder = shared_data / "tokenizers" / "bert-uncased"
    with pytest.raises(UsageError, match="cannot tell which token ends a document"):
        load_tokenizer(folder)
    spec = load_tokenizer(folder, eos="[SEP]")
    assert spec.eos == 102
    assert not spec.lossless
    assert len(spec.encode("word " * 500)) == 500
