"""Golden numbers of `ICLMetric` of ai2-olmo-eval 0.9.0, the metric that OLMES tasks are known by.

    python tests/support/reference_scores.py --write OLMO_EVAL_FOLDER

writes tests/olm_train/evaluation/reference_scores.json, in an environment of its own, as the pins
of that package collide with ours: torch, torchmetrics 1.9.0, numpy, and the unpacked package's
`metrics.py` (`OLMO_EVAL_FOLDER` is its folder; nothing else of it is imported). What goes in are
made-up logits, which `case` gives to the writer and to the test alike: no text of any task.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GOLDEN = Path(__file__).resolve().parents[1] / "olm_train/evaluation/reference_scores.json"
SEEDS = range(6)
VOCAB, CONTEXT = 11, 3
KINDS = ("acc", "len_norm", "pmi_dc", "bpb", "ce_loss")


@dataclass
class Case:
    """Questions, their continuations, and the logits of each place before its label.

    Attributes:
        question, choice, gold: of each request; gold: the right choice of its question.
        tokens: ids of each continuation.
        chars, bytes: of each continuation's text, its leading space counted.
        spaces: 1 where it begins with one.
        logits, alone: fp32 [tokens, VOCAB] of each request, after the context and after the
            unconditional one.
    """

    question: list[int] = field(default_factory=list)
    choice: list[int] = field(default_factory=list)
    gold: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    chars: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    spaces: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    alone: list[Tensor] = field(default_factory=list)


def case(seed: int, *, single: bool = False) -> Case:
    """Return made-up requests: 2 to 5 choices a question, or the right one alone."""
    draw = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draw))

    found = Case()
    for question in range(12):
        choices = 1 if single else integer(2, 6)
        gold = integer(0, choices)
        for choice in range(choices):
            count, space = integer(1, 6), integer(0, 2)
            chars = space + integer(1, 30)
            found.question.append(question)
            found.choice.append(choice)
            found.gold.append(gold)
            found.tokens.append([integer(0, VOCAB) for _ in range(count)])
            found.chars.append(chars)
            found.bytes.append(chars + integer(0, 9))
            found.spaces.append(space)
            # fp64 arithmetic from integers: the same bits with whatever version of torch
            for logits in (found.logits, found.alone):
                raw = torch.randint(-4000, 4001, (count, VOCAB), generator=draw)
                logits.append((raw.double() / 1000).float())
    return found


def near(dtype: torch.dtype) -> Case:
    """Return one question whose second choice is the likelier one by less than bf16 can tell."""
    logits = [torch.zeros(1, VOCAB, dtype=dtype) for _ in range(2)]
    logits[0][0, 4], logits[1][0, 4] = 1.0, 1.001
    shape = {"tokens": [[4], [4]], "chars": [2, 2], "bytes": [2, 2], "spaces": [0, 0]}
    return Case([0, 0], [0, 1], [1, 1], **shape, logits=logits, alone=logits)  # type: ignore[arg-type]


def missing() -> Case:
    """Return two questions: one answered rightly, and one that lacks its first, right choice."""
    logits = [torch.zeros(1, VOCAB) for _ in range(3)]
    logits[1][0, 4] = 1.0
    rest = {"tokens": [[4]] * 3, "chars": [2] * 3, "bytes": [2] * 3, "spaces": [0] * 3}
    return Case([0, 0, 1], [0, 1, 1], [1, 1, 0], **rest, logits=logits, alone=logits)  # type: ignore[arg-type]


def log_p(case: Case, logits: list[Tensor]) -> list[float]:
    """Return the log-probability of each continuation, in fp64."""
    pairs = zip(logits, case.tokens, strict=True)
    return [float(each.double().log_softmax(-1)[range(len(ids)), ids].sum()) for each, ids in pairs]


def reference(metrics: Any, kind: str, case: Case) -> dict[str, float]:
    """Return what the reference computes of a case."""
    metric = metrics.ICLMetric(metric_type=kind)
    longest = max(map(len, case.tokens))
    requests = len(case.tokens)

    def padded(logits: list[Tensor]) -> Tensor:
        whole = torch.zeros(requests, CONTEXT + longest, VOCAB, dtype=logits[0].dtype)
        for row, each in enumerate(logits):
            whole[row, CONTEXT - 1 : CONTEXT - 1 + len(each)] = each
        return whole

    plain = [each - space for each, space in zip(case.chars, case.spaces, strict=True)]
    plain_bytes = [each - space for each, space in zip(case.bytes, case.spaces, strict=True)]
    batch = {
        "doc_id": torch.tensor(case.question),
        "cont_id": torch.tensor(case.choice),
        "label_id": torch.tensor(case.gold),
        "ctx_len": torch.full((requests,), CONTEXT),
        "dc_len": torch.full((requests,), CONTEXT),
        "cont_len": torch.tensor([len(each) for each in case.tokens]),
        "continuation": torch.tensor([each + [0] * (longest - len(each)) for each in case.tokens]),
        "cont_str_len": torch.tensor(case.chars),
        "cont_byte_len": torch.tensor(case.bytes),
        "cont_str_len_no_leading_space": torch.tensor(plain),
        "cont_byte_len_no_leading_space": torch.tensor(plain_bytes),
    }
    metric.update(batch, padded(case.logits), padded(case.alone))
    return {name: float(value) for name, value in metric.compute().items()}


def main(folder: Path) -> None:
    """Write the golden numbers."""
    package = types.ModuleType("olmo_eval")
    package.__path__ = [str(folder)]
    util = types.ModuleType("olmo_eval.util")
    util.all_gather_object = lambda value: [value]  # type: ignore[attr-defined]
    sys.modules |= {"olmo_eval": package, "olmo_eval.util": util}
    spec = importlib.util.spec_from_file_location("olmo_eval.metrics", folder / "metrics.py")
    assert spec is not None
    assert spec.loader is not None
    metrics = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(metrics)
    found: dict[str, Any] = {}
    for kind in KINDS:
        single = kind in ("bpb", "ce_loss")
        found[kind] = [reference(metrics, kind, case(seed, single=single)) for seed in SEEDS]
    found["bf16"] = reference(metrics, "acc", near(torch.bfloat16))
    found["missing"] = reference(metrics, "acc", missing())
    check = [log_p(each, each.logits) for each in map(case, SEEDS)]
    found["log_p"] = check
    assert not any(math.isnan(value) for each in check for value in each)
    GOLDEN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    assert sys.argv[1] == "--write"
    main(Path(sys.argv[2]))
