"""An encoder of one's own goes through the gate, as ours do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.texts import write_texts
from support.tokenizing import digests

from olm_data.encoders import choose_encoder, likely_encoder, make_encoder, own
from olm_data.encoders.base import Unencodable, concatenate
from olm_data.encoders.own import OwnEncoder
from olm_data.errors import UsageError, ValidationError
from olm_data.tokenizer.tokenizer import TokenizerSpec, load_tokenizer
from olm_data.verbs import tokenize

MODULE = "support.own_text"


@pytest.fixture
def spec(tiny_tokenizer: Path) -> TokenizerSpec:
    return load_tokenizer(tiny_tokenizer)


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
