"""Row 77: a hostile tokenizer.json is refused in seconds, by a child that has the trouble."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.memory import forget_peak, peak
from support.tokenizer_kinds import SPLITS, variant_of
from support.tokenizing import make_dataset, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, UsageError
from olm_data.tokenizer import probe as tokenizer_probe
from olm_data.tokenizer.probe import probe
from olm_data.tokenizer.tokenizer import load_tokenizer


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def split(pattern: str) -> dict[str, Any]:
    regex = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    step = SPLITS["gpt2"] | {"use_regex": False}
    return {"type": "Sequence", "pretokenizers": [regex | {"invert": False}, step]}


HOSTILE: dict[str, dict[str, Any]] = {
    "doubles": {"normalizer": {"type": "Sequence", "normalizers": [replace("a", "aa")] * 40}},
    "doubles an unusual character": {
        "normalizer": {"type": "Sequence", "normalizers": [replace("\u1234", "\u1234" * 9)] * 9}
    },
    "nested": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Sequence", "normalizers": [replace("a", "a" * 10), replace("a", "aaaa")]},
                {"type": "Sequence", "normalizers": [replace("a", "aaaa")]},
            ],
        }
    },
    "long": {"normalizer": replace("a", "b" * 100_000)},
    "decoder": {
        "decoder": {"type": "Sequence", "decoders": [replace("a", "aa"), replace("a", "aa")] * 20}
    },
    "backtracks": {"pre_tokenizer": split(r"(a+)+$|(a|aa)+$|(\w+\s?)*$")},
    "backtracks on digits": {"pre_tokenizer": split(r"^(\d+)*x")},
    "backtracks on its own letter": {"pre_tokenizer": split("(\u0436+)+\u0437")},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_that_explodes_or_never_ends_is_refused(tiny_tokenizer: Path, kind: str) -> None:
    data = variant_of(tiny_tokenizer.read_bytes(), **HOSTILE[kind])
    forget_peak()
    before = peak()
    cpu = time.process_time()
    with pytest.raises(InputError) as caught:
        probe(data, "theirs")
    assert caught.value.where == "theirs"
    assert "source you trust" in str(caught.value.fix)
    assert peak() - before < 50 << 10
    assert time.process_time() - cpu < 5


def test_a_child_that_needs_too_much_memory_or_time_is_a_refusal(
    tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tiny_tokenizer.read_bytes()
    with monkeypatch.context() as less:
        less.setattr(tokenizer_probe, "MEMORY_BASE", 1 << 20)
        with pytest.raises(InputError, match="not safe to use"):
            probe(data, "t")
    monkeypatch.setattr(tokenizer_probe, "WALL_SECONDS", 0.001)
    with pytest.raises(InputError, match="not safe to use"):
        probe(data, "t")
    monkeypatch.setattr(tokenizer_probe, "MOST_BYTES", 100)
    with pytest.raises(InputError, match="more than 100"):
        probe(data, "t")


def test_a_good_file_is_tried_once(tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe(tiny_tokenizer.read_bytes(), "t")
    monkeypatch.setattr(tokenizer_probe, "_failure", lambda data: "tried again")
    probe(tiny_tokenizer.read_bytes(), "t")
    with pytest.raises(InputError):
        probe(tiny_tokenizer.read_bytes() + b"\n", "t")


def test_commands_try_the_tokenizer_of_a_dataset_first(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from olm_data.extensions.verify.datasets import verify

    text = write_jsonl(tmp_path / "in.jsonl", ["text"])
    make_dataset([text], tiny_tokenizer, tmp_path / "out")
    tried = []

    def fail(data: bytes) -> str:
        tried.append(data)
        return "trouble"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setattr(tokenizer_probe, "_failure", fail)
    for use in (
        lambda: Dataset.open(str(tmp_path / "out")).tokenizer,
        lambda: verify(str(tmp_path / "out")),
        lambda: load_tokenizer(tmp_path / "out"),
    ):
        with pytest.raises(InputError, match="not safe to use"):
            use()
    assert tried == [tiny_tokenizer.read_bytes()] * 3


def test_a_sentencepiece_model_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e")
    for path in (tmp_path, tmp_path / "tokenizer.model"):
        with pytest.raises(UsageError, match=r"sentencepiece|tokenizer\.json") as caught:
            load_tokenizer(path)
        assert "save_pretrained" in str(caught.value)
