"""Loss and bits per byte on a data set: a plain loop and lm_eval find the same, on any ranks."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from lm_eval.api.instance import Instance
from support.distributed import run_ranks
from support.hf_twin import save_both
from support.runs import build_trainer, group_world, metrics
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.cli import cli
from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, UsageError
from olm_data.run_log.metric_names import group_of, of_group
from olm_train.checkpoint.portable import open_portable
from olm_train.data.batch import Batch
from olm_train.distributed.world import World
from olm_train.evaluation.held_out import HeldOut, lines_of_groups, metrics_of, open_held_out
from olm_train.extensions.downstream.command import main
from olm_train.extensions.downstream.evaluation import EvaluationData
from olm_train.extensions.harness.model import OlmLM

BY = ["input", "document_length", "position", "context"]
NAME = "--trainer.callbacks.lm_evaluator"
ALL = (f"{NAME}.eval_on_startup=true", f"{NAME}.by=[{', '.join(BY)}]")


def assert_near(found: dict[str, float], expected: dict[str, float]) -> None:
    """Of all labels within rounding, of groups of them nearly."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        rel = 1e-6 if group_of(name) is None else 1e-5
        assert found[name] == pytest.approx(value, rel=rel), name


def plain(model: torch.nn.Module, held: Dataset, length: int) -> dict[str, float]:
    """The metrics, document by document and label by label."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for number in range(held.documents):
        start, stop = held.document_span(number)
        size = held.origin(number).text_bytes
        cuts = [start, *range(start // length * length + length, stop, length), stop]
        for a, b in itertools.pairwise(cuts):
            before = [held.manifest.tokenizer.eos] if a == start else held.read(a - 1, a).tolist()
            ids = torch.tensor([*before, *held.read(a, b).tolist()])
            with torch.no_grad():
                logits = model(ids[None, :-1])[0]
            losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
            for loss in losses.tolist():
                groups = [("", ""), ("input", held.origin(number).input)]
                for key in groups:
                    for column, value in enumerate((loss, 1, size / (stop - start))):
                        sums[key][column] += value
    found = metrics_of(*sums["", ""])
    nats, labels, size = sums["input", held.origin(0).input]
    found[of_group("BPB", "input", held.origin(0).input)] = nats / math.log(2) / size
    found[of_group("tokens", "input", held.origin(0).input)] = labels
    return found


def test_a_run_logs_what_a_plain_loop_finds(tiny_mixture: Path, tmp_path: Path) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path, *ALL, stop=2)
    trainer.train_module.ensure_weights()
    held = Dataset.open(str(tiny_mixture.parent / "held"))
    expected = plain(trainer.train_module.model, held, 32)
    trainer.fit()
    first = next(line["eval"]["held"] for line in metrics(tmp_path) if "eval" in line)
    assert_near({name: first[name] for name in expected}, expected)
    assert first["tokens"] == held.tokens
    texts = [held.origin(n).text_bytes for n in range(held.documents)]
    nats = first["CE loss"] * first["tokens"]
    assert first["BPB"] == pytest.approx(nats / math.log(2) / sum(texts), rel=1e-9)
    ways = {found[1] for found in map(group_of, first) if found is not None}
    assert ways == set(BY)
    for way in BY:
        tokens = [v for n, v in first.items() if n.startswith(of_group("tokens", way, ""))]
        assert sum(tokens) == first["tokens"], way


def evaluated(lock: Path, folder: Path) -> dict[str, float]:
    """The first evaluation of a run; on several ranks row by row."""
    world = group_world() if dist.is_initialized() else World()
    size = [] if world.size == 1 else ["--train_module.rank_microbatch_size=32"]
    build_trainer(lock, folder, *ALL, *size, stop=2, world=world).fit()
    found: dict[str, float] = next(
        line["eval"]["held"] for line in metrics(folder) if "eval" in line
    )
    return found


@pytest.mark.slow
def test_two_ranks_row_by_row_and_one_with_large_batches_agree(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    alone = evaluated(tiny_mixture, tmp_path / "one")
    two, _ = run_ranks(evaluated, 2, tiny_mixture, tmp_path / "two")
    assert_near(two, alone)


def test_the_command_finds_what_the_run_logged(tiny_mixture: Path, tmp_path: Path) -> None:
    held = str(tiny_mixture.parent / "held")
    by = f"{NAME}.by=[context]"
    build_trainer(tiny_mixture, tmp_path, by, stop=2).fit()
    logged = next(line["eval"]["held"] for line in metrics(tmp_path) if "eval" in line)
    said = CliRunner().invoke(main, [str(tmp_path), "--data", held, "--by", "context"])
    assert said.exit_code == 0, said.output
    assert f"{logged['BPB']:.4f} bits per byte" in said.stdout
    assert said.stdout.splitlines()[1].startswith("  context: BPB 0-63 ")


def test_a_part_of_a_set_has_bytes_in_proportion(tiny_mixture: Path) -> None:
    held = Dataset.open(str(tiny_mixture.parent / "held"))
    found = HeldOut(held, 32, 64).measure(ones, max_batches=2)
    assert found["tokens"] < held.tokens
    assert found["CE loss"] == 1.0
    assert found["BPB"] > 0


def ones(batch: Batch) -> torch.Tensor:
    return (batch.labels != -100).float()


def nothing(batch: Batch) -> None:
    """What a module returns that knows the sum of the losses of a batch and no more."""


def in_sum(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return ones(batch).sum(), ones(batch).sum()


def test_a_module_without_losses_of_labels_has_bits_per_byte_of_all_of_them(
    tiny_mixture: Path,
) -> None:
    held = Dataset.open(str(tiny_mixture.parent / "held"))
    whole = HeldOut(held, 32, 64).measure(nothing, in_sum)
    exact = HeldOut(held, 32, 64).measure(ones)
    assert whole == pytest.approx(exact)
    part = HeldOut(held, 32, 64).measure(nothing, in_sum, max_batches=1)
    assert "BPB" not in part, "bytes of some labels are not known"
    with pytest.raises(UsageError, match="gives no losses of labels"):
        HeldOut(held, 32, 64, by=["input"]).measure(nothing, in_sum)


def test_it_leaves_off_where_it_is_told_to(tiny_mixture: Path) -> None:
    held = Dataset.open(str(tiny_mixture.parent / "held"))
    assert HeldOut(held, 32, 64).measure(ones, stop=lambda: True) is None


def test_a_line_a_way_says_what_the_groups_are() -> None:
    results = metrics_of(2.0, 1.0, 4.0) | {"BPB/language=de": 1.5, "CE loss/language=de": 2.0}
    assert lines_of_groups(results) == ["language: BPB de 1.500"]
    assert lines_of_groups({"CE loss": 1.0, "CE loss/a=b": 2.0}) == ["a: CE loss b 2.000"]


def test_a_set_without_documents_is_refused_instead_of_measured_as_nan(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    text = str(write_jsonl(tmp_path / "a.jsonl", texts(3)))
    words = ["--tokenizer", str(tiny_tokenizer), "--output", str(tmp_path / "tokens")]
    made = CliRunner().invoke(cli, ["tokenize", text, *words, "--holdout", "1/1000000"])
    assert "nothing is held out: 1/1000000 of 3 documents came to none" in made.stdout
    empty = str(tmp_path / "tokens" / "validation")
    with pytest.raises(InputError, match="the held-out data set 'x' holds no document"):
        open_held_out("x", empty, None)


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
