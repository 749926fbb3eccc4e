"""Tokenizers: facts about a file that hold whatever traps it sets; which token ends documents."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from olm_data.errors import InputError, UsageError
from olm_data.tokenizer import probe as module
from olm_data.tokenizer.byte_alphabet import byte_alphabet
from olm_data.tokenizer.definition import Definition
from olm_data.tokenizer.probe import CHILD, probe
from olm_data.tokenizer.probe_child import REFUSED, RUN, texts
from olm_data.tokenizer.tokenizer import (
    PROBE_TEXTS,
    configured_eos,
    end_token,
    load_tokenizer,
    spec_from_bytes,
)


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


def definition(**parts: Any) -> Definition:
    model = {"type": "BPE", "vocab": {"a": 0, "<s>": 1}, "merges": []}
    return Definition(json.dumps({"model": model} | parts).encode(), "t")


@pytest.mark.parametrize("data", [b"", b"[]", b'{"model": 3}', b"{" * 1000])
def test_what_is_no_object_with_a_model_is_refused(data: bytes) -> None:
    with pytest.raises(InputError):
        Definition(data, "t")


@pytest.mark.parametrize(
    ("normalizer", "form", "rewrites"),
    [
        (None, None, ""),
        ({"type": "NFC"}, "NFC", "NFC"),
        ({"type": "Sequence", "normalizers": [{"type": "NFD"}]}, "NFD", "NFD"),
        ({"type": "Prepend", "prepend": "_"}, None, ""),
        ({"type": "Replace", "pattern": {"String": " "}, "content": "_"}, None, ""),
        ({"type": "Replace", "pattern": {"Regex": " +"}, "content": "_"}, None, "Replace"),
        (17, None, ""),
    ],
)
def test_the_normaliser_is_a_form_or_named_by_its_first_rule(
    normalizer: Any, form: str | None, rewrites: str
) -> None:
    found = definition(normalizer=normalizer)
    assert (found.form, found.rewrites) == (form, rewrites)


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_rules_that_multiply_text_are_refused(part: str) -> None:
    rule = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10}
    key = f"{part}s"
    with pytest.raises(InputError, match="multiplies text"):
        definition(**{part: {"type": "Sequence", key: [rule, rule]}})


def test_a_variant_marks_and_strips_tokens_and_leaves_the_definition_as_it_was() -> None:
    added = [{"content": "<s>", "id": 1}, {"content": "<x>", "id": 2, "special": True}]
    found = definition(added_tokens=added, truncation={"max_length": 8})
    assert found.special_tokens == {"<x>": 2}
    whole = json.loads(found.variant({"<s>", "<x>"}))
    assert [token["special"] for token in whole["added_tokens"]] == [True, True]
    assert whole["truncation"] is whole["padding"] is None
    assert json.loads(found.variant({"<s>"}, strip_special=True))["added_tokens"] == []
    hidden = json.loads(found.variant({"<s>"}, unspellable=True))["model"]["vocab"]
    assert "<s>" not in hidden
    assert sorted(hidden.values()) == [0, 1]
    assert found.special_tokens == {"<x>": 2}
    assert found.bpe.vocab == {"a": 0, "<s>": 1}


@pytest.mark.parametrize(
    ("eos", "configured", "ends"),
    [("none", "<stop>", None), ("<a>", "<stop>", "<a>"), ("auto", "<stop>", "<stop>")],
)
def test_what_is_asked_for_comes_before_what_is_configured(
    eos: str, configured: str, ends: str | None
) -> None:
    assert end_token(eos, {"</s>": 1}, configured, "t") == ends


def test_one_well_known_name_is_taken_and_of_two_none() -> None:
    assert end_token("auto", {"<pad>": 0, "</s>": 1}, None, "t") == "</s>"
    with pytest.raises(UsageError, match="several tokens may end"):
        end_token("auto", {"<eos>": 0, "</s>": 1}, None, "t")
    with pytest.raises(UsageError, match="cannot tell") as caught:
        end_token("auto", {"[SEP]": 0}, None, "t")
    assert "[SEP]" in str(caught.value.where)


@pytest.mark.parametrize(
    ("config", "token"),
    [
        (None, None),
        (b"{}", None),
        (b'{"eos_token": "</s>"}', "</s>"),
        (b'{"eos_token": {"content": "</s>"}}', "</s>"),
        (b'{"eos_token": 3}', None),
    ],
)
def test_the_configured_token_is_a_string_or_an_object_with_one(
    config: bytes | None, token: str | None
) -> None:
    assert configured_eos(config, "t") == token


def test_each_byte_has_the_character_of_the_library() -> None:
    found = byte_alphabet()
    assert (sorted(found.values()), set(found)) == (list(range(256)), set(ByteLevel.alphabet()))
    split = ByteLevel(add_prefix_space=False, use_regex=False)
    text = "aé 🙂\n\x00"
    ((spelled, _),) = split.pre_tokenize_str(text)
    assert bytes(found[c] for c in spelled) == text.encode()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def children(own_cache: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    started: list[Any] = []
    run = subprocess.run

    def counted(*arguments: Any, **options: Any) -> Any:
        started.append(arguments)
        return run(*arguments, **options)

    monkeypatch.setattr(module.subprocess, "run", counted)
    return started


def test_a_good_file_is_tried_once_and_remembered(
    tiny_tokenizer: Path, children: list[Any]
) -> None:
    data = tiny_tokenizer.read_bytes()
    probe(data, "tokenizer.json")
    probe(data, "tokenizer.json")
    assert len(children) == 1
    probe(data + b" ", "another")
    assert len(children) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"MOST_BYTES": 10}, "more than 10"),
        ({"CPU_SECONDS": 0}, "not safe to use"),
        ({"MEMORY_BASE": 1 << 20, "MEMORY_FACTOR": 0}, "not safe to use"),
        ({"WALL_SECONDS": 0.01}, "not safe to use"),
    ],
)
def test_each_limit_ends_a_trial_and_is_not_remembered_as_good(
    tiny_tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    children: list[Any],
    change: dict[str, float],
    says: str,
) -> None:
    data = tiny_tokenizer.read_bytes()
    with monkeypatch.context() as patch:
        for name, value in change.items():
            patch.setattr(module, name, value)
        with pytest.raises(InputError, match=says):
            probe(data, "tokenizer.json")
    before = len(children)
    probe(data, "tokenizer.json")
    assert len(children) == before + 1


def tried(data: bytes, seconds: int = 20) -> subprocess.CompletedProcess[bytes]:
    found = find_spec("tokenizers")
    assert found.origin is not None
    packages = str(Path(found.origin).parents[1])
    arguments = [sys.executable, "-I", str(CHILD), str(seconds), str(4 << 30), packages]
    return subprocess.run(arguments, input=data, capture_output=True)


def test_texts_are_runs_of_common_characters_and_of_the_files_own() -> None:
    found = texts(
        json.dumps({"pre_tokenizer": {"Regex": "\u0436+"}, "model": {"\u0416": 1}}).encode()
    )
    assert "\u0436" * RUN in found
    assert "\u0436" * RUN + "b" in found
    assert not any("\u0416" in text for text in found)  # of the vocabulary, no rule
    assert "a" * RUN + "!" in found


def test_a_good_file_is_answered_with_zero_and_no_word(tiny_tokenizer: Path) -> None:
    done = tried(tiny_tokenizer.read_bytes())
    assert (done.returncode, done.stdout) == (0, b"")


def test_what_is_no_tokenizer_is_left_to_the_parent() -> None:
    assert tried(b"{}").returncode == 0


@pytest.mark.slow
def test_a_file_that_multiplies_text_is_refused(tiny_tokenizer: Path) -> None:
    value = json.loads(tiny_tokenizer.read_bytes())
    value["normalizer"] = {
        "type": "Replace", "pattern": {"String": "a"}, "content": "b" * 10_000,
    }  # fmt: skip
    done = tried(json.dumps(value).encode())
    assert done.returncode == REFUSED
    assert b"more than a hundred times as long" in done.stdout
