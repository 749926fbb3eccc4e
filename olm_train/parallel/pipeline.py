"""Pipeline parallelism: ranks have other layers, and hand the states of micro-batches on.

    decoder -> split (stages.py) -> stages of this rank; the decoder lacks all other layers
    micro-batches -> torch's schedule -> [stage: states, and at last loss / count] -> gradients
    batches of an evaluation -> the stages, one after another, as many batches at a time -> losses

All ranks of a pipeline read the same rows, so what a layer has to know of documents is looked up by
the number of the micro-batch; states alone travel, and their gradients. Names of parameters are
those of the whole model. What a rank logs is of its stages, the loss of the last one; sums over all
ranks are those of the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.optim import Optimizer

from olm_data.errors import UsageError
from olm_train.distributed.world import World, gathered
from olm_train.model.decoder import Decoder
from olm_train.parallel.apply import reshard
from olm_train.parallel.config import PipelineParallelConfig
from olm_train.parallel.exchange import new_groups
from olm_train.parallel.mesh import Mesh
from olm_train.parallel.stages import SEVERAL, require_micro_batches, spans

Schedule = PipelineScheduleSingle | PipelineScheduleMulti
SINGLE: dict[str, Callable[..., Schedule]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
Take = Callable[[int, Any], Tensor]
"""Takes a micro-batch, whose number it is told, through the layers of a stage."""


class Stage(nn.Module):
    """Layers of a decoder that are neighbours, with the embeddings or the head at its ends.

    Its modules are those of the decoder. FSDP2 gathers what is in no block here.

    Attributes:
        index: which of all stages.
        layers: of the decoder.
        last: whether the head is here.
        number: of the micro-batch that comes next.
        take: what is done with it.
    """

    def __init__(self, model: Decoder, index: int, layers: range) -> None:
        super().__init__()
        self.index, self.layers = index, layers
        self.last = layers.stop == model.config.n_layers
        self.blocks = nn.ModuleList(model.blocks[layer] for layer in layers)
        if index == 0:
            self.embeddings, self.position_embeddings = model.embeddings, model.position_embeddings
        if self.last:
            self.norm, self.lm_head = model.norm, model.lm_head
        self.number = 0
        self.take: Callable[[Stage, Tensor | None], Tensor]

    def forward(self, *states: Tensor) -> Tensor:
        """[b, S, d_model], of the first stage nothing -> the like, of the last one a scalar."""
        return self.take(self, states[0] if states else None)


class _Numbered(PipelineStage):
    """Tells the stage which micro-batch comes."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        cast(Stage, self.submod).number = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)


class Pipeline:
    """The stages of a rank, and how they and those of other ranks work together.

    Args:
        config: degree, schedule and split.
        model: a decoder, which loses the layers of other ranks.
        mesh: of the run.
        world: every rank of it calls this.

    Attributes:
        stages: of this rank, ascending.
        group: ranks with the other layers.
        first: whether this rank is the first one of these.
        whole: the decoder with all its parameters, those of other ranks on the device "meta".

    Raises:
        UsageError: the model cannot be cut so.
    """

    def __init__(
        self, config: PipelineParallelConfig, model: Decoder, mesh: Mesh, world: World
    ) -> None:
        require_stages(config, model)
        self.config, self._model, self._device = config, model, world.device
        self.ranks, self.group = new_groups(mesh, world, "pp")
        self.rank = self.ranks.index(world.rank)
        self.first = self.rank == 0
        layers = spans(config, model.config)
        self.stages = [Stage(model, n, layers[n]) for n in config.stages_of(self.rank)]
        self.whole = copy.copy(model)
        self.whole._modules = dict(model._modules)
        model.blocks = copy.copy(model.blocks)
        model.blocks._modules = dict(model.blocks._modules)
        here = {module for stage in self.stages for module in stage.modules()}
        for holder in (model, model.blocks):
            for name, module in holder._modules.items():
                if module is not None and module is not model.blocks and module not in here:
                    holder._modules[name] = None  # type: ignore[assignment]
        for stage in self.stages:
            stage.take = self._take
        self._act: Callable[[int], Tensor]
        self._now: tuple[range, Tensor | None] = range(0), None
        self._schedules: dict[object, Schedule] = {}

    @property
    def last(self) -> bool:
        """Whether this rank has the head."""
        return self.stages[-1].last

    def decode(self, *args: Any, **options: Any) -> Any:
        """Call the decoder with the layers, and the states, of the stage at work."""
        layers, states = self._now
        return self._model(*args, layers=layers, states=states, **options)

    def run(self, micro: Sequence[Any], take: Take) -> None:
        """Take the micro-batches of a step through all stages, forward and back.

        Gradients are there, reduced and cut as FSDP2 does it, when this returns.

        Args:
            micro: the same on each rank of the pipeline, of one shape.
            take: called once for each stage and micro-batch; returns states, in the last stage the
                loss that is differentiated.

        Raises:
            UsageError: the schedule cannot take as many; or their shapes differ.
        """
        shapes = {tuple(batch.input_ids.shape) for batch in micro}
        if len(shapes) > 1:
            raise UsageError(
                f"the micro-batches of a step have shapes {', '.join(map(str, sorted(shapes)))}",
                where="train_module.pp_config",
                why="stages send states of one shape to each other",
                fix="give micro-batches of as many rows",
            )
        schedule = self._schedule(len(micro), *shapes)
        self._act = lambda number: take(number, micro[number])
        schedule.step(target=torch.arange(len(micro)), return_outputs=False)

    @torch.no_grad()
    def look(self, batches: Sequence[Any], take: Take) -> list[Tensor]:
        """Take batches through all stages, without a gradient; every rank of the pipeline calls it.

        Args:
            batches: the same on each rank.
            take: as in `run`.

        Returns:
            What it returned in the last stage, by batch; on other ranks an empty list.
        """
        held, found = dict[tuple[int, int], Tensor](), list[Tensor]()
        stages = self.config.stages
        self._act = lambda number: take(number, batches[number])
        for time in range(len(batches) + stages - 1):
            operations = []
            for stage in self.stages:
                stage.number = time - stage.index
                if not 0 <= stage.number < len(batches):
                    continue
                states = held.pop((stage.index, stage.number), None)
                result = stage(*([] if states is None else [states]))
                if stage.last:
                    found.append(result)
                elif self.config.rank_of(stage.index + 1) == self.rank:
                    held[stage.index + 1, stage.number] = result
                else:
                    operations.append(self._operation(dist.isend, result, stage.index + 1))
            for stage in self.stages:
                number = time + 1 - stage.index
                theirs = stage.index and self.config.rank_of(stage.index - 1) != self.rank
                if theirs and 0 <= number < len(batches):
                    buffer = self._states(batches[number].input_ids.shape, self._device)
                    held[stage.index, number] = buffer
                    operations.append(self._operation(dist.irecv, buffer, stage.index - 1))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
        for stage in self.stages:
            reshard(stage)
        return found

    def from_last(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the rank with the head, on each rank; all have its shape."""
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=self._peer(self.config.stages - 1), group=self.group)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return the values of the ranks of the pipeline, on each of them."""
        return gathered(value, self.group)

    def keep_own(self, optimizer: Optimizer) -> None:
        """Take parameters of other ranks out of an optimiser of the whole model; groups that are
        empty then stay, so that they are the same on each rank."""
        for group in optimizer.param_groups:
            here = [not parameter.is_meta for parameter in group["params"]]
            for key in group.keys() & {"params", "names", "parts"}:
                pairs = zip(group[key], here, strict=True)
                group[key] = [each for each, kept in pairs if kept]
        for parameter in [each for each in optimizer.state if each.is_meta]:
            del optimizer.state[parameter]

    def _take(self, stage: Stage, states: Tensor | None) -> Tensor:
        self._now = stage.layers, states
        return self._act(stage.number)

    def _schedule(self, number: int, shape: tuple[int, ...]) -> Schedule:
        """Return torch's schedule of so many micro-batches [b, S]; of the last sizes it is kept,
        with its buffers."""
        if (number, shape) not in self._schedules:
            require_micro_batches(self.config, number)
            stages = [self._torch_stage(stage, shape) for stage in self.stages]
            options = {"n_microbatches": number, "loss_fn": _itself, "scale_grads": False}
            kind = (SINGLE | SEVERAL)[self.config.schedule]
            given = stages if self.config.schedule in SEVERAL else stages[0]
            self._schedules = {(number, shape): kind(given, **options)}
        return self._schedules[number, shape]

    def _torch_stage(self, stage: Stage, shape: tuple[int, ...]) -> PipelineStage:
        states = self._states(shape, torch.device("meta")).requires_grad_()
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        return _Numbered(
            stage,
            stage.index,
            self.config.stages,
            self._device,
            input_args=(states,) if stage.index else (),
            output_args=(loss if stage.last else states,),
            group=self.group,
        )

    def _states(self, shape: Sequence[int], device: torch.device) -> Tensor:
        dtype, width = self._model.compute_dtype, self._model.config.d_model
        return torch.empty(*shape, width, dtype=dtype, device=device)

    def _peer(self, stage: int) -> int:
        return self.ranks[self.config.rank_of(stage)]

    def _operation(self, kind: Callable[..., Any], tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor.contiguous(), self._peer(stage), self.group)


def carrying(states: Tensor, term: Tensor) -> Tensor:
    """Return states whose backward pass differentiates a term of the loss too."""
    found: Tensor = _Carrying.apply(states, term)  # type: ignore[no-untyped-call]
    return found


class _Carrying(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, term: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(term))
        return states.clone()  # torch's split backward pass detaches it, which no view can be

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor]:
        return upstream[0], ctx.saved_tensors[0]


def _itself(loss: Tensor, _: Tensor) -> Tensor:
    """The loss of a stage that has computed it."""
    return loss


def require_stages(config: PipelineParallelConfig, model: Decoder) -> None:
    """Refuse a model that cannot be cut into stages.

    Raises:
        UsageError: why, and what to set instead.
    """
    if model.config.head.tied:
        raise UsageError(
            "the head is the embedding table, and the two lie in other stages",
            where="model.head.tied",
            why="its copies would drift apart, or be summed at each step",
            fix="set it to false, or leave pp_config out",
        )
    if type(model).forward is not Decoder.forward:
        raise UsageError(
            f"{type(model).__name__} has a forward pass of its own, which knows no stages",
            where="train_module.pp_config",
            fix="leave it out",
        )
    spans(config, model.config)
