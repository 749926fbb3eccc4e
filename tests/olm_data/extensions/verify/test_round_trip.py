"""Row D3: `verify` encodes as `tokenize` did, whatever the model and the text, and contains it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.tokenizer_kinds import bpe, unigram, word_level

from olm_data.cli import cli
from olm_data.encoders.base import concatenate
from olm_data.encoders.gigatoken import GigatokenEncoder
from olm_data.errors import InputError, ValidationError
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer

KINDS = {"unigram": unigram, "bpe": bpe, "word level": word_level}


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli, [str(a) for a in arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("special", ["plain", "allow"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_that_spells_the_end_token_is_no_finding(
    tmp_path: Path, kind: str, special: str
) -> None:
    data = json.loads(KINDS[kind]())
    for token in data["added_tokens"]:
        token["special"] = token["content"] != "</s>"  # the dataset's rule alone makes it one
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    text = "the cat </s> sat on the mat"
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": text}) + "\n")
    output = tmp_path / "out"
    code, said = run(
        *("tokenize", tmp_path / "in.jsonl", "--output", output, "--workers", 1),
        *("--tokenizer", tmp_path / "tokenizer.json", "--eos", "</s>", "--special", special),
    )
    assert code == 0, said
    code, said = run("verify", output, "--deep")
    assert code == 0, said


def test_a_library_that_panics_is_one_error(
    tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_tokenizer(tiny_tokenizer)

    class PanicException(BaseException):
        pass

    class Hostile:
        def decode(self, *_: object, **__: object) -> str:
            raise PanicException("index out of bounds")

        def encode_batch(self, *_: object, **__: object) -> None:
            raise PanicException("poisoned")

    encoder = GigatokenEncoder(spec, "plain")
    monkeypatch.setattr(encoder, "_tokenizer", Hostile())
    with pytest.raises(ValidationError, match="gigatoken fails on the text"):
        encoder.encode(*concatenate([b"one", b"two"]))
    monkeypatch.setitem(vars(spec), "reference", Hostile())
    with pytest.raises(InputError, match="fails to decode") as caught:
        TokenizerSpec.decode(spec, [1, 2])
    assert caught.value.why == "index out of bounds"
