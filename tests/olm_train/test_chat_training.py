"""Training on chats: only what is trained has a gradient, on any ranks, and answers end."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from support.chat_ranks import steps, steps_on_ranks
from support.distributed import run_ranks
from support.forked import forked
from support.runs import environment, run
from support.small_datasets import mix_datasets, write_dataset
from support.small_tokenizer import train as small_tokenizer

import olm_data
from olm_train.data import DataLoader
from olm_train.distributed.world import World
from olm_train.model.loss import loss_sums


def mixture(folder: Path, trained: list[list[int]]) -> Path:
    """A mixture of rows of 16 tokens, one document each, of which those at some places train."""
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 64, 17) for _ in trained]
    masks = [np.isin(np.arange(17), places) for places in trained]
    write_dataset(folder / "chat", [documents], vocab_size=64, trained=[masks])
    return mix_datasets(
        folder, ["chat"], stages=[(256, {"chat": 1})], sequence_length=16, packing="document"
    )


def test_the_logits_of_untrained_tokens_have_a_gradient_of_exactly_zero(tmp_path: Path) -> None:
    lock = mixture(tmp_path, [[3, 4, 16], [0], [1], [5, 6]] * 4)
    with DataLoader(lock, global_batch_size=64, rank_microbatch_size=64, prefetch=0) as loader:
        (batch,) = next(iter(loader))
    logits = torch.randn(*batch.labels.shape, 64, requires_grad=True)
    loss_sums(logits, batch.labels, 1e-4).total.backward()
    some = logits.grad.abs().sum(-1) > 0
    assert torch.equal(some, batch.labels >= 0)
    wanted = {
        tuple(document.tokens[:16].tolist()): document.trained[1:].tolist()
        for document in olm_data.Dataset.open(tmp_path / "chat")
    }
    rows = [tuple(ids.tolist()) for ids in batch.input_ids]
    assert any(ids in wanted for ids in rows)
    for ids, row in zip(rows, some, strict=True):  # others hold what is left of a document: nothing
        assert row.tolist() == wanted.get(ids, [False] * 16)


def test_two_ranks_equal_one_where_one_of_them_has_no_trained_token(tmp_path: Path) -> None:
    lock = mixture(tmp_path, [[3, 9, 10]] + [[]] * 15)
    one, weights, counts = steps(str(lock), 1, World())
    assert sorted(counts) == [0, 0, 0, 3]  # three steps have nothing to train at all
    for micro_rows in (1, 2):
        ranks = run_ranks(steps_on_ranks, 2, str(lock), micro_rows)
        assert sorted(own for rank in ranks for own in rank[2]) == [0] * 7 + [3]
        for losses, found, _ in ranks:
            assert [labels for _, labels in losses] == [labels for _, labels in one]
            assert [loss for loss, _ in losses] == pytest.approx(
                [loss for loss, _ in one], rel=1e-5
            )
            for name, value in weights.items():
                torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_after_training_on_dialogues_every_answer_is_right_and_ends(tmp_path: Path) -> None:
    words = ["quick", "brown", "fox", "lazy", "dog", "runs", "jumps", "over"]
    rng = random.Random(1)
    tokenizer = small_tokenizer(tmp_path / "tok.json")
    with open(tmp_path / "chats.jsonl", "w") as file:
        for _ in range(400):
            turns = []
            for word in rng.choices(words, k=rng.randint(1, 3)):
                turns += [{"role": "user", "content": f"say {word}"}]
                turns += [{"role": "assistant", "content": f"the {word}"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    olm_data.tokenize(
        tmp_path / "chats.jsonl",
        format="chat",
        chat_template="tulu",
        tokenizer=tokenizer,
        output=tmp_path / "chat",
    )
    lock = mix_datasets(
        tmp_path,
        ["chat"],
        stages=[(160 * 1024, {"chat": 1})],
        sequence_length=128,
        packing="best_fit",
    )
    config = {
        "model": {"d_model": 64, "n_layers": 2, "n_heads": 4, "feed_forward": {"hidden_size": 128}},
        "data_loader": {"mixture": str(lock), "global_batch_size": 1024},
        "train_module": {"rank_microbatch_size": 1024, "optim": {"name": "adamw", "lr": 1e-2}},
        "trainer": {"save_folder": str(tmp_path / "run")},
    }
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(config))
    done = run(tmp_path / "train.yaml")
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "prompts.jsonl", "w") as file:
        for word in words:
            text = f"<|user|>\nsay {word}\n<|assistant|>\n"
            file.write(json.dumps({"prompt": text}) + "\n")
    prompts = tmp_path / "prompts.jsonl"
    options = ["--temperature", "0", "--max-new-tokens", "40", "--stop", "<|endoftext|>"]
    asking = ("generate", tmp_path / "run", "--prompts", prompts, *options)
    asked = forked("olm_train.cli", *asking, environment=environment())
    assert asked.returncode == 0, asked.stderr
    answers = [json.loads(line) for line in asked.stdout.splitlines()]
    assert [answer["text"] for answer in answers] == [f"the {word}" for word in words]
