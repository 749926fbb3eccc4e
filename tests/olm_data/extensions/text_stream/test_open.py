"""Corpora of the hub, through its real clients against a stub on loopback."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.hub_corpora import CHECKS
from support.hub_stub import HubStub, write_fineweb_edu
from support.texts import given, write_texts

from olm_data.extensions.text_stream.documents import ReadingOrder, Slot, local_corpus
from olm_data.tokenizer.tokenizer import TokenizerSpec


@pytest.mark.slow
def test_corpora_of_the_hub(
    tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = write_fineweb_edu(tmp_path / "hub")
    with HubStub(tmp_path / "hub").running() as stub:
        for name, value in stub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        # the clients read the address of the hub when they are imported, so once a process
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            for check in CHECKS:
                pool.submit(check, texts, stub.root, tiny_tokenizer).result()


def test_files_of_ones_own_are_taken_as_tokenize_takes_them(
    tmp_path: Path, spec: TokenizerSpec, tiny_tokenizer: Path
) -> None:
    texts = write_texts(tmp_path / "a", [3, 3])
    files = sorted((tmp_path / "a").iterdir())
    assert given(local_corpus([str(files[1])], tiny_tokenizer), Slot(), ReadingOrder()) == texts[3:]
    (tmp_path / "b.txt").write_text("one\n\n\ntwo\n")
    (tmp_path / "notes.pdf").write_text("x")
    cut = local_corpus(tmp_path / "b.txt", str(tiny_tokenizer), separator="blank-lines")
    assert given(cut, Slot(), ReadingOrder()) == ["one", "two"]
    table = tmp_path / "c.parquet"
    pq.write_table(pa.table({"body": ["x y"], "text": ["z"]}), table)
    assert given(local_corpus(table, spec, text_column="body"), Slot(), ReadingOrder()) == ["x y"]
