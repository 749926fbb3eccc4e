"""Which layers a stage of a pipeline has, and what its ranks do when: numbers in, numbers out.

    FLOPs of each layer -> split -> first layer of each stage
    schedule, micro-batches -> actions of each rank -> timeline -> bubble, picture, what is alive

A rank takes its actions in their order, each as soon as what it needs is there. The orders of
interleaved_1f1b, zero_bubble and dualpipev are torch's own (`torch.distributed.pipelining`).

Sources: GPipe (Huang et al., 2019); 1F1B and its interleaved form (Narayanan et al., 2021); zero
bubble, V-shaped (Qi et al., 2023); DualPipe (DeepSeek-V3, 2024), cut in half to a V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import SimpleNamespace
from typing import NamedTuple

from torch import nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from olm_data.counts import counted
from olm_data.errors import UsageError
from olm_train.model.attention_backend import pairs_of
from olm_train.model.config import DecoderConfig
from olm_train.parallel.config import PipelineParallelConfig

DOCUMENT = 2048
"""Tokens of the documents that stages are planned for."""
SEVERAL: dict[str, Callable[..., PipelineScheduleMulti]] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
"""Schedules with several stages a rank."""
TIMES = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Of a forward pass, a backward pass, and one for activations and for weights alone."""
_TORCH = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
WIDTH = 88


def layer_flops(model: DecoderConfig) -> list[int]:
    """Return the FLOPs of each layer for a token, and those of the head in the last one's.

    Looking up embeddings is none.
    """
    pairs = model.attention.pair_flops(model)
    found = []
    for part, window in zip(model.feed_forwards, model.windows, strict=True):
        matrices = model.attention.flops(model, model.norm) + part.flops(model)
        found.append(matrices + pairs * (pairs_of(DOCUMENT, window) // DOCUMENT))
    found[-1] += 6 * model.vocab_size * model.d_model
    return found


def split(costs: Sequence[int], stages: int) -> list[range]:
    """Cut layers into stages of neighbours, at least one each, so that the costliest one costs the
    least; of several ways the one whose squares of costs have the smallest sum.

    Args:
        costs: of each layer.
        stages: at most as many as layers.
    """
    ends = [0, *accumulate(costs)]
    # by number of layers: costliest stage, sum of squares, first layers of the stages
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage in range(stages):
        best = {
            stop: min(
                (
                    max(most, ends[stop] - ends[first]),
                    squares + (ends[stop] - ends[first]) ** 2,
                    (*firsts, first),
                )
                for first, (most, squares, firsts) in best.items()
                if first < stop
            )
            for stop in range(stage + 1, len(ends))
        }
    firsts = best[len(costs)][2]
    return [*map(range, firsts, (*firsts[1:], len(costs)))]


def spans(config: PipelineParallelConfig, model: DecoderConfig) -> list[range]:
    """Return the layers of each stage.

    Raises:
        UsageError: there are fewer layers than stages, or split points beyond them.
    """
    layers, points = model.n_layers, config.split_points
    if points is not None and points[-1] >= layers:
        raise UsageError(
            f"the split point {points[-1]} is no layer: the model has {layers}, from 0",
            where="train_module.pp_config.split_points",
            fix="give first layers of stages",
        )
    if config.stages > layers:
        raise UsageError(
            f"{counted(layers, 'layer')} cannot be cut into {config.stages} stages",
            where="train_module.pp_config.degree",
            why=f"the schedule {config.schedule} has {config.stages // config.degree} on a rank",
            fix=f"set a degree of at most {layers // (config.stages // config.degree)}, or "
            "schedule: 1f1b, which has one",
        )
    if points is not None:
        return [*map(range, (0, *points), (*points, layers))]
    return split(layer_flops(model), config.stages)


def require_micro_batches(config: PipelineParallelConfig, *numbers: int) -> None:
    """Refuse numbers of micro-batches of a step that the schedule cannot take.

    Raises:
        UsageError: says which numbers next to it it can.
    """
    number = next((each for each in numbers if not fits(config, each)), None)
    if number is None:
        return
    below = next((n for n in range(number - 1, 0, -1) if fits(config, n)), None)
    above = next(n for n in range(number + 1, 2 * (number + config.stages)) if fits(config, n))
    raise UsageError(
        f"the schedule {config.schedule} cannot take {number} micro-batch"
        f"{'es' * (number > 1)} a step over {counted(config.stages, 'stage')}",
        where="train_module.pp_config.schedule",
        why="it needs at least as many as stages"
        if config.schedule != "interleaved_1f1b"
        else f"it takes them in rounds of {config.degree} or a little more, all alike",
        fix="let a step have " + " or ".join(str(n) for n in (below, above) if n) + " of them, by "
        "global_batch_size or rank_microbatch_size; gpipe and zero_bubble take any number",
    )


def fits(config: PipelineParallelConfig, number: int) -> bool:
    """Whether the schedule can take so many micro-batches a step."""
    if config.schedule in ("1f1b", "dualpipev"):
        return number >= config.stages
    if config.schedule == "interleaved_1f1b":
        return number % max(1, number // config.degree) == 0
    return True


class Action(NamedTuple):
    """What a rank does: a key of `TIMES`, for a stage and a micro-batch."""

    kind: str
    stage: int
    number: int


@dataclass(frozen=True)
class Timeline:
    """A step of a pipeline.

    Attributes:
        config: degree and schedule.
        micro_batches: of the step.

    Raises:
        UsageError: the schedule cannot take as many.
    """

    config: PipelineParallelConfig
    micro_batches: int

    @cached_property
    def actions(self) -> list[list[Action]]:
        """Of each rank, in their order."""
        require_micro_batches(self.config, self.micro_batches)
        config, number = self.config, self.micro_batches
        if config.schedule in SEVERAL:
            return [self._of_torch(rank) for rank in range(config.degree)]
        found = []
        for rank in range(config.degree):
            ahead = number if config.schedule == "gpipe" else config.degree - 1 - rank
            forward = [Action("F", rank, n) for n in range(number)]
            backward = [Action("B", rank, n) for n in range(number)]
            mixed = [a for pair in zip(forward[ahead:], backward, strict=False) for a in pair]
            found.append(forward[:ahead] + mixed + backward[max(0, number - ahead) :])
        return found

    def _of_torch(self, rank: int) -> list[Action]:
        config = self.config
        stage = SimpleNamespace(
            num_stages=config.stages,
            group_size=config.degree,
            group_rank=rank,
            submod=nn.Identity(),
        )
        each = [stage] * (config.stages // config.degree)
        order = SEVERAL[config.schedule](each, self.micro_batches).pipeline_order[rank]
        flat = [a for action in order if action for a in action.sub_actions or (action,)]
        found = []
        for a in flat:
            assert a.microbatch_index is not None  # each of these computes
            kind = _TORCH[a.computation_type.name]
            found.append(Action(kind, a.stage_index, a.microbatch_index))
        return found

    @cached_property
    def begins(self) -> list[list[int]]:
        """When each action of each rank begins, in units of `TIMES`."""
        done, waiting = dict[tuple[str, int, int], int](), [[*each] for each in self.actions]
        found, free = [list[int]() for _ in waiting], [0] * len(waiting)
        while any(waiting):
            for rank, left in enumerate(waiting):
                while left and (ready := self._ready(left[0], done)) is not None:
                    kind, stage, number = left.pop(0)
                    found[rank].append(max(ready, free[rank]))
                    free[rank] = found[rank][-1] + TIMES[kind]
                    if kind != "W":
                        done["F" if kind == "F" else "B", stage, number] = free[rank]
        return found

    def _ready(self, action: Action, done: dict[tuple[str, int, int], int]) -> int | None:
        """Return when what an action needs is there; None: nobody has computed it yet."""
        kind, stage, number = action
        if kind == "F":
            return 0 if stage == 0 else done.get(("F", stage - 1, number))
        if kind == "W":
            return done["B", stage, number]
        last = stage == self.config.stages - 1
        return done.get(("F", stage, number) if last else ("B", stage + 1, number))

    @property
    def bubble(self) -> float:
        """Share of the time of a step that a rank waits, where all stages take the same."""
        work = [sum(TIMES[action.kind] for action in each) for each in self.actions]
        return 1 - sum(work) / (len(work) * self._length)

    @property
    def _length(self) -> int:
        pairs = zip(self.begins, self.actions, strict=True)
        return max(begins[-1] + TIMES[each[-1].kind] for begins, each in pairs)

    def alive(self, rank: int, layers: Sequence[int]) -> int:
        """Return the most layers that a rank keeps activations of, each micro-batch by itself.

        Args:
            layers: of each stage.
        """
        most = now = 0
        for kind, stage, _ in self.actions[rank]:
            if kind != "I":  # W ends what it leaves
                now += layers[stage] if kind == "F" else -layers[stage]
            most = max(most, now)
        return most

    def picture(self) -> list[str]:
        """Return a line a rank, time from left to right: F0 the forward pass of the first
        micro-batch, B0 its backward pass, or I0 and W0 that for activations and for weights; f, b,
        i, w: of a rank's later stages."""
        size = len(str(self.micro_batches - 1)) + 2
        lines = []
        for rank, (begins, each) in enumerate(zip(self.begins, self.actions, strict=True)):
            cells = [" " * size] * self._length
            first = min(action.stage for action in each)
            for at, (kind, stage, number) in zip(begins, each, strict=True):
                shown = kind if stage == first else kind.lower()
                cells[at] = f"{shown}{number}".ljust(size)
                cells[at + 1 : at + TIMES[kind]] = ["-" * (size - 1) + " "] * (TIMES[kind] - 1)
            text = "".join(cells).rstrip()
            lines.append(f"rank {rank}: {text[:WIDTH]}{'...' * (len(text) > WIDTH)}")
        return lines


def shares(config: PipelineParallelConfig, model: DecoderConfig) -> list[float]:
    """Return the share of a token's FLOPs that each stage has."""
    costs = layer_flops(model)
    return [sum(costs[i] for i in span) / sum(costs) for span in spans(config, model)]
