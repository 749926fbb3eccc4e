"""Bits per byte of a data set: those of lm_eval's rolling log-likelihood, and of the end."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from lm_eval.api.instance import Instance
from support.hf_twin import save_both
from support.tokenizing import make_dataset, write_jsonl

from olm_train.checkpoint.portable import open_portable
from olm_train.extensions.downstream.evaluation import EvaluationData
from olm_train.extensions.harness.model import OlmLM

TEXTS = ["a", "the fox", "seven owls sleep while a dog jumps.\n", "def f(x):\n    return x", "über"]
EOS = "<|endoftext|>"


def asked(kind: str, *arguments: tuple[str, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, n) for n, each in enumerate(arguments)]


@pytest.mark.parametrize(("bos", "eos"), [("none", EOS), (EOS, "none"), (EOS, EOS)])
def test_they_are_those_of_lm_eval_whether_bos_begins_documents_or_eos_ends_them(
    tmp_path: Path, tiny_tokenizer: Path, bos: str, eos: str
) -> None:
    model, _ = save_both(tmp_path, tiny_tokenizer)
    file = write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    data = str(tmp_path / "tokens")
    make_dataset([file], tiny_tokenizer, data, bos=bos, eos=eos)
    found = open_portable(str(model), "latest", print)
    measured = EvaluationData(found, [data], sequence_length=256).measure(found).datasets[data]
    lm = OlmLM(model, max_length=256)
    texts = asked("loglikelihood_rolling", *((text,) for text in TEXTS))
    log_p = sum(lm.loglikelihood_rolling(texts, disable_tqdm=True))
    if eos == EOS:  # which lm_eval leaves out
        ends = [(None, [0, *lm.tok_encode(text)], [0]) for text in TEXTS]
        log_p += sum(each for each, _ in lm._loglikelihood_tokens(ends, disable_tqdm=True))
    size = sum(len(text.encode()) for text in TEXTS)
    assert measured["BPB"] == pytest.approx(-log_p / math.log(2) / size, rel=1e-5)


def test_there_are_none_where_nothing_stands_before_a_first_token(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    model, _ = save_both(tmp_path, tiny_tokenizer)
    file = write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    data = str(tmp_path / "tokens")
    make_dataset([file], tiny_tokenizer, data, bos="none", eos="none")
    found = open_portable(str(model), "latest", print)
    measured = EvaluationData(found, [data], sequence_length=256).measure(found).datasets[data]
    assert "CE loss" in measured
    assert "BPB" not in measured
