"""Generation: seeded, bounded, ends at the end-of-document token, reads only what verifies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.runs import build_trainer

from olm_train.checkpoint.load import open_checkpoint
from olm_train.checkpoint.weights import load_model
from olm_train.distributed.world import World
from olm_train.generate import generate, main, sample

pytestmark = pytest.mark.xdist_group("generate")  # its fixtures are made once


class Fixed:
    """A stand-in for the model: logits [1, n, V] that depend on the last id."""

    def __init__(self, logits: dict[int, list[float]]) -> None:
        self.logits, self.seen = logits, 0

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        self.seen = max(self.seen, ids.shape[1])
        return torch.tensor([[self.logits[int(i)] for i in ids[0]]])


def draw(model: Fixed, **options: object) -> list[int]:
    settings = {
        "max_new_tokens": 6, "temperature": 1.0, "top_k": 0, "seed": 0, "context": 8, "eos": None,
    }  # fmt: skip
    return sample(model, [0], **(settings | options))  # type: ignore[arg-type]


FLAT = Fixed({i: [0.0, 1.0, 0.9, -1.0] for i in range(4)})


def test_temperature_zero_takes_the_most_likely() -> None:
    assert draw(FLAT, temperature=0.0) == [1] * 6


def test_top_k_bounds_the_choice_and_is_used() -> None:
    some = {token for seed in range(30) for token in draw(FLAT, top_k=2, seed=seed)}
    every = {token for seed in range(30) for token in draw(FLAT, seed=seed)}
    assert (some, every) == ({1, 2}, {0, 1, 2, 3})


def test_same_seed_same_text_other_seed_other_text() -> None:
    assert draw(FLAT, seed=3) == draw(FLAT, seed=3)
    assert len({tuple(draw(FLAT, seed=seed)) for seed in range(10)}) > 1


def test_it_ends_at_the_end_of_document_and_leaves_it_out() -> None:
    chain = Fixed({0: [0.0, 9.0, 0.0], 1: [0.0, 0.0, 9.0], 2: [9.0, 0.0, 0.0]})
    assert draw(chain, temperature=0.0, eos=2) == [1]


def test_no_more_than_the_context_is_looked_at() -> None:
    model = Fixed(FLAT.logits)
    draw(model, max_new_tokens=20, context=5)
    assert model.seen == 5


@pytest.fixture(scope="module")
def run_folder(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate") / "run"
    build_trainer(
        tiny_mixture,
        folder,
        "--trainer.callbacks.checkpointer.save_interval=12",
        "--train_module.optim.lr=3e-2",
        "--model.vocab_multiple=96",
    ).fit()
    return folder


def test_command_prints_the_text_and_writes_the_sample(run_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "sample.json"
    arguments = [str(run_folder), "--prompt", "the quick", "--max-new-tokens", "9"]
    result = CliRunner().invoke(main, [*arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    written = json.loads(output.read_text())
    assert result.stdout == f"the quick{written['text']}\n"
    assert len(written["ids"]) <= 9
    assert written["checkpoint"] == "step00000024"


def test_rows_that_pad_the_vocabulary_are_saved_and_never_drawn(run_folder: Path) -> None:
    model = load_model(open_checkpoint(run_folder / "step00000024", World()))
    assert len(model.embeddings.weight) == 576 > model.config.vocab_size == 512
    assert not model.embeddings.weight[512:].any()
    drawn = generate(run_folder, "the", max_new_tokens=40, temperature=50.0, top_k=0)["ids"]
    assert len(drawn) > 10
    assert max(drawn) < 512


def test_a_named_checkpoint_is_another_model(run_folder: Path) -> None:
    texts = {
        name: generate(run_folder, "def f", checkpoint=name, temperature=0.0)["ids"]
        for name in ("12", "step00000024")
    }
    assert texts["12"] != texts["step00000024"]
    assert generate(run_folder, "", max_new_tokens=3)["prompt"] == ""  # begins a document


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["none"], 4, "there is no checkpoint"),
        (["{run}", "--checkpoint", "7"], 4, "there is no checkpoint 7"),
        (["{run}", "--top-k", "x"], 2, "not a valid integer"),
    ],
)
def test_mistakes_have_a_message(
    run_folder: Path, arguments: list[str], code: int, says: str
) -> None:
    result = CliRunner().invoke(main, [text.format(run=run_folder) for text in arguments])
    assert result.exit_code == code
    assert says in result.output
