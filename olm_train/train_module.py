"""A decoder, its loss and its optimiser. No loop, no files, no clock.

The loss of a step is the sum of the cross entropy over the global batch's valid labels divided by
their number: how evenly they fall on ranks and micro-batches does not matter. Where labels have
weights w it is sum(w * loss) / sum(w).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from olm_data.config.arguments import checked
from olm_data.errors import ValidationError
from olm_data.run_log.metric_names import (
    ATTENTION_PAIRS,
    CE_LOSS,
    LABELS,
    SEQUENCE_LENGTH,
    TOKENS,
    Z_LOSS,
)
from olm_train.data.batch import AnyBatch, Batch, check_ids
from olm_train.data.dealing import ContextShare, SequenceSlice, digest_of
from olm_train.distributed.world import World
from olm_train.estimate.device_defaults import Capability, resolve
from olm_train.estimate.flops import attention_pairs, num_flops_per_token
from olm_train.expert_balance import ExpertBalance
from olm_train.gradient_step import Counted, GradientStep, MicroLoss
from olm_train.loss_context import LossTerms
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder, build_decoder
from olm_train.model.head import Head
from olm_train.model.init import init_parameters
from olm_train.model.loss import LossSums, count_valid
from olm_train.model.loss_chunked import by_label_chunked, with_labels
from olm_train.model.loss_config import CHUNK_SIZE
from olm_train.model.shards import assign, like, misfits, shapes, shown_by_block
from olm_train.model.weights_folder import kept
from olm_train.optim.state import make_room, state_of
from olm_train.parallel.apply import parallelize, reshard
from olm_train.parallel.context import ContextParallel, require_same_rows
from olm_train.parallel.pipeline import Pipeline, carrying
from olm_train.parallel.tensor import TensorParallel
from olm_train.stability.gate import FiniteGate
from olm_train.train_module_config import TransformerTrainModuleConfig

FP32_CHUNK = 1024
"""States that are taken through the head at a time where the logits are to be in fp32."""


class TransformerTrainModule(GradientStep):
    """A decoder with its optimiser.

    Args:
        config: options of the step.
        model: shape of the decoder; or a decoder with its weights, which is trained itself: it is
            moved to the device, in fp32, and ranks get the weights of rank 0.
        seed: with each parameter's name decides its initial value, where a shape is given.
        world: the processes that train together; None: this one alone, on the CPU.
        init: give the weights their initial values now; False: not before `ensure_weights`, and
            not at all where a state is loaded.

    Attributes:
        config, seed, world: as given, `auto` replaced by what it is on this device; the world knows
            which ranks share micro-batches.
        model: the decoder, its parameters possibly sharded.
        optimizer: over the parameters of `model`.
        loss: the loss that was chosen.
        experts: counts and biases of a mixture of experts; None: the model has none.
    """

    @checked()
    def __init__(
        self,
        config: TransformerTrainModuleConfig,
        model: DecoderConfig | Decoder,
        *,
        seed: int,
        world: World | None = None,
        init: bool = True,
    ) -> None:
        world = world or World()
        given = model if isinstance(model, Decoder) else None
        shape = model.config if isinstance(model, Decoder) else model
        shape, config, _ = resolve(shape, config, Capability.of(world.device))
        compiling = config.compile_model is True
        mesh = config.mesh(world.size, world.nodes)
        world = replace(world, sharers=config.sharers, stages=mesh.pp)
        self.config, self.seed, self.world = config, seed, world
        self._has_weights = False
        torch.set_float32_matmul_precision(config.float32_matmul_precision)
        self.loss = config.chosen_loss(shape)
        self._loss = self.loss.build()
        weights = None if given is None else given.emptied(shape)
        self.model: Decoder = given or build_decoder(shape, device="meta", dtype=torch.float32)
        self._context: ContextParallel | None = None
        if config.cp_config is not None:
            self._context = ContextParallel(config.cp_config, self.model, mesh, world)
        self._deal = config.dealing(shape.windows, mesh.coordinates(world.rank)["cp"])
        self._tensor: TensorParallel | None = None
        if config.tp_config is not None:
            self._tensor = TensorParallel(self.model, self.loss, mesh, world)
            self._loss = self._tensor.loss
        self._compared = world.sharers == world.stages == 1
        self._pipeline, whole = None, self.model
        if config.pp_config is not None:
            config.check_schedule(world.size)
            self._pipeline = Pipeline(config.pp_config, self.model, mesh, world)
            self._stages, whole = self._pipeline.group, self._pipeline.whole
            self.world = world = replace(world, groups=(self._pipeline.group,))
        self._logged: list[str] | None = None
        self._forward = parallelize(
            self.model,
            config.dp_config,
            world,
            mesh=mesh,
            tensor=self._tensor,
            stages=[] if self._pipeline is None else self._pipeline.stages,
            checkpointing=config.ac_config,
            compiling=config.compile_config if compiling else None,
            float8=config.float8_config,
        )
        self.optimizer = config.optim.build(whole)
        if self._pipeline is not None:
            self._pipeline.keep_own(self.optimizer)
            self._forward = self._pipeline.decode  # type: ignore[assignment]
        if (join := getattr(self.optimizer, "join", None)) is not None:
            holders = world if self._pipeline is None else World(device=world.device)
            join(holders, reduced=config.dp_config.param_dtype == "bfloat16")
        self._guard = getattr(self.optimizer, "guard", None)
        self._scheduler, self._scaling = config.scheduler, config.lr_batch_scaling
        self._max_grad_norm, self._peak = config.max_grad_norm, config.optim.lr
        self._reduce_each = config.dp_config.reduce_each_microbatch
        self.experts = ExpertBalance.of(self.model, world)
        self._gate = FiniteGate(config.non_finite, world.device)
        if weights is not None:
            self._take_over(weights)
        elif init:
            self.ensure_weights()

    @property
    def num_params(self) -> int:
        """Parameters of the model, without the rows that pad its vocabulary."""
        return self.model.config.num_params

    def describe(self) -> list[str]:
        """Return attention, loss, float8 layers, and the rates of groups that have their own."""
        backend = self.model.config.attention.backend
        lines = [f"attention {backend}; loss {self.loss.name}: {self.loss.why}"]
        if (float8 := self.config.float8_config) is not None:
            lines.append(str(float8.choose(self.model, torch.bfloat16)))
        for number, group in enumerate(self._groups_apart()):
            first = group["names"][0] if group.get("names") else "unnamed"
            lines.append(
                f"group {number}: peak rate {group['peak_lr']:g}, {len(group['params']):,} tensors "
                f"from {first}"
            )
        return lines

    def flops_per_token(self, pairs_per_token: float) -> float:
        """Return the FLOPs of forward and backward for one token."""
        return num_flops_per_token(self.model.config, pairs_per_token=pairs_per_token)

    def ensure_weights(self) -> None:
        """Give the weights their initial values, unless they were drawn or loaded before.

        They are the same bits for every strategy and world.
        """
        if not self._has_weights:
            init_parameters(self.model, self.seed)
            self._has_weights = True

    def require_weighing(self) -> None:
        self.loss.require_weighing()

    def _counted(self, batches: Sequence[Batch | AnyBatch]) -> Counted:
        micro = self._shares(batches)
        if self.experts is not None:
            self.experts.begin(micro, self._expert_counts, pipelined=self._pipeline is not None)
        counts = torch.stack([torch.stack(self._counts(batch)) for batch in micro]).sum(0)
        if self._pipeline is not None and not self._pipeline.first:
            counts = torch.zeros_like(counts)  # which another rank has counted
        return Counted(
            micro,
            counts,
            names=(TOKENS, LABELS, ATTENTION_PAIRS),
            divisors=(1, 3),
            known={SEQUENCE_LENGTH: micro[0].max_seqlen},
        )

    def _loss_of(self, batch: Batch, divisors: Sequence[Tensor], terms: LossTerms) -> MicroLoss:
        labels, divisor = divisors
        loss: Callable[..., LossSums] = self._loss
        loss = partial(loss, **terms.given(loss, 1 / divisor))
        if self.watch_losses is not None and self.loss.labels_apart:
            loss = with_labels(self._loss, self.loss.chunk_size or CHUNK_SIZE)
        reduce = partial(loss, labels=batch.labels)
        if batch.weights is not None:
            reduce = partial(reduce, weights=batch.weights)
        balance: dict[str, Tensor] = {}
        if self.experts is None:
            sums = self._reduce(batch, reduce)
        else:
            sums, routed = self._reduce(batch, reduce, routing=self.experts.routing(batch))
            balance = self.experts.terms(routed, labels)
        logged = {name: term.detach() for name, term in balance.items()}
        if isinstance(sums, Tensor):  # states, of a stage that is not the last
            states = carrying(sums, sum(balance.values(), sums.new_zeros(()))) if balance else sums
            return MicroLoss(states, logged)
        logged = {CE_LOSS: sums.cross_entropy / divisor} | logged
        if sums.z is not None:
            logged[Z_LOSS] = sums.z / divisor
        return MicroLoss(sum(balance.values(), sums.total / divisor), logged, sums.by_label)

    def _each(
        self, micro: Sequence[Any], loss_of: Callable[[Any], MicroLoss]
    ) -> Iterator[MicroLoss]:
        if self._pipeline is None:
            yield from super()._each(micro, loss_of)
            return
        parts: list[list[MicroLoss]] = [[] for _ in micro]  # of the stages here

        def take(number: int, batch: Batch) -> Tensor:
            parts[number].append(loss_of(batch))
            return parts[number][-1].total

        self._pipeline.run(micro, take)
        if self._logged is None:  # a loss of one's own has what it has; the same at each step
            names = [name for part in parts[0] for name in part.logged]
            found = [name for each in self._pipeline.gather(names) for name in each]
            self._logged = [*dict.fromkeys(found)]
        none = torch.zeros((), device=self.world.device)
        for batch, own in zip(micro, parts, strict=True):
            logged = {
                name: sum((part.logged.get(name, none) for part in own), none)
                for name in self._logged
            }
            by_label = None
            if self.watch_losses is not None and self.loss.own is None:
                here = own[-1].by_label
                room = torch.zeros(batch.labels.numel(), device=none.device)
                by_label = self._pipeline.from_last(room if here is None else here)
            yield MicroLoss(none, logged, by_label)

    def _shares(self, batches: Sequence[Batch | AnyBatch]) -> list[Batch]:
        """Return the micro-batches on the device; where ranks share them, this one's tokens."""
        found, context = [Batch.of(batch) for batch in batches], self._context
        if self._deal is not None:
            found = [self._deal(batch) for batch in found]
        found = [self._batch(batch) for batch in found]
        if not self._compared:
            require_same_rows(digest_of(found), self.world)
            self._compared = True
        if context is not None:
            found = [ContextShare.take(batch, context.rank, context.contexts) for batch in found]
        return self._slices(found)

    def _slices(self, batches: list[Batch]) -> list[Batch]:
        """Return the tokens that this rank has between products of matrices."""
        if self._tensor is None:
            return batches
        ranks = self._tensor.ranks
        return [SequenceSlice.take(batch, ranks.rank, ranks.degree) for batch in batches]

    def _watched(self, batch: Batch, by_label: Tensor) -> tuple[Batch, Tensor]:
        if self._tensor is not None and isinstance(batch, SequenceSlice):
            by_label = self._tensor.ranks.collect(by_label.view_as(batch.labels))().flatten()
            batch = batch.whole
        if self._context is None or not isinstance(batch, ContextShare):
            return batch, by_label
        return batch.whole, self._context.exchange(batch).collect(by_label)

    @torch.no_grad()
    def _expert_counts(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Tokens of each expert, each [layers, E], before micro-batches are trained on."""
        experts, found = self.experts, list[Tensor]()
        assert experts is not None

        def take(_: int, batch: Batch) -> Tensor:
            states, routed = self._reduce(batch, lambda _, x: x, routing=experts.routing(batch))
            if routed is not None:
                found.append(routed.counts)
            return cast(Tensor, states)

        if self._pipeline is not None:
            self._pipeline.look(batches, take)
        else:
            for batch in batches:
                take(0, batch)
        return found

    def _stepped(self, left_out: Tensor) -> Mapping[str, Tensor]:
        return {} if self.experts is None else self.experts.finish(left_out)

    @torch.no_grad()
    def eval_losses(self, batch: Batch | AnyBatch, *, fp32_logits: bool = False) -> Tensor:
        """Return the cross entropy of each label of this rank's batch, without a step.

        Args:
            batch: moved to the device if need be.
            fp32_logits: see `by_label_chunked`; at most 1,024 rows of logits exist at a time.

        Returns:
            fp32 [b, S] on the device, in nats; 0 where a label is ignored.
        """
        here, tensor = self._batch(batch), self._tensor
        chunk_size = self.loss.chunk_size
        if fp32_logits:
            chunk_size = min(chunk_size or FP32_CHUNK, FP32_CHUNK)
        by_label = partial(
            by_label_chunked if tensor is None else tensor.by_label,
            chunk_size=chunk_size,
            fp32_logits=fp32_logits,
        )

        def losses(batch: Batch) -> Tensor:
            if self._pipeline is not None:
                return self._pipelined_losses(batch, by_label)
            batch = batch.to(self.world.device)
            return self._reduce(batch, partial(by_label, labels=batch.labels))

        return losses(here) if tensor is None else tensor.in_turn(here.to("cpu"), losses)

    def _pipelined_losses(self, batch: Batch, by_label: Callable[..., Tensor]) -> Tensor:
        """Return the losses of this rank's batch; ranks of the pipeline look at theirs together."""
        assert self._pipeline is not None
        batches = [each.to(self.world.device) for each in self._pipeline.gather(batch.to("cpu"))]
        found = self._pipeline.look(
            self._slices(batches),
            lambda n, each: self._reduce(each, partial(by_label, labels=batches[n].labels)),
        )
        if not self._pipeline.last:
            found = [torch.zeros(b.labels.shape, device=self.world.device) for b in batches]
        return [self._pipeline.from_last(each) for each in found][self._pipeline.rank]

    def eval_batch(self, batch: Batch | AnyBatch) -> tuple[Tensor, Tensor]:
        """Loss of this rank's batch without a step.

        Returns:
            Sum of the cross entropy in nats (float64) and number of valid labels (int64), scalars
            on the device. Add both up over batches and ranks before dividing.
        """
        here = self._batch(batch)
        return self.eval_losses(here).sum(dtype=torch.float64), count_valid(here.labels)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Weights and optimiser state, under names that do not depend on the parallelism.

        Returns:
            {"model": {parameter or buffer: tensor}, "optim": {"parameter.exp_avg": tensor, ...}},
            DTensors where sharded: what torch's distributed checkpoint saves, and loads in place
            under any other sharding. They are the live ones: copy before an async save. What else
            the optimiser keeps of a parameter is there as a plain value.
        """
        reshard(self.model)
        guard = {} if self._guard is None else self._guard.state()
        return {
            "model": {
                name: shown_by_block(like(value.data, value)) for name, value in kept(self.model)
            },
            "optim": {
                name: shown_by_block(value) if isinstance(value, Tensor) else value
                for name, value in (state_of(self.model, self.optimizer) | guard).items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over a state; tensors may be full or sharded as here.

        Args:
            state: as `state_dict` returns it. Without "optim" the optimiser is left alone.

        Raises:
            ValidationError: a name or shape does not fit; then nothing is changed.
        """
        if "optim" in state:
            make_room(self.model, self.optimizer, state["optim"])
        own = self.state_dict()
        given = state["model"]
        if self._pipeline is not None:  # weights of the whole model, such as exported ones
            others = dict(kept(self._pipeline.whole)).keys() - own["model"].keys()
            given = {name: value for name, value in given.items() if name not in others}
        pairs = list(_paired(own["model"], given, "model"))
        if "optim" in state:
            pairs += _paired(own["optim"], state["optim"], "optim")
        self._put(pairs)
        self._has_weights = True

    @torch.no_grad()
    def _take_over(self, weights: dict[str, Tensor]) -> None:
        """Give the model the weights of rank 0, a tensor at a time."""
        here = dict((*self.model.named_parameters(), *self.model.named_buffers()))
        for name in [*weights]:
            whole = self.world.from_main(weights.pop(name).to(self.world.device))
            if (target := here.get(name)) is not None:
                assign(target, whole)
        self._has_weights = True

    def _batch(self, given: Batch | AnyBatch) -> Batch:
        """Return a micro-batch of ids that the model has, on the device."""
        assert self._has_weights, "neither ensure_weights nor load_state_dict was called"
        return check_ids(Batch.of(given), self.model_config.vocab_size).to(self.world.device)

    def _reduce(self, batch: Batch, reduce: Callable[[Head, Tensor], Any], **options: Any) -> Any:
        return batch.through(self._forward, reduce, **options)

    def _counts(self, batch: Batch) -> tuple[Tensor, ...]:
        """Tokens, valid labels, attention pairs, sum of the labels' weights, int64 scalars."""
        tokens = batch.input_ids.new_full((), batch.input_ids.numel())
        pairs = attention_pairs(self.model.config, batch.positions)
        labels = count_valid(batch.labels)
        weights = labels if batch.weights is None else count_valid(batch.labels, batch.weights)
        return tokens, labels, pairs, weights

    def _groups_apart(self) -> list[dict[str, Any]]:
        """Return the groups of the optimiser, or none where they have one rate."""
        groups = self.optimizer.param_groups
        return groups if len({group["peak_lr"] for group in groups}) > 1 else []


def _paired(
    own: Mapping[str, Any], given: Mapping[str, Any], what: str
) -> Iterator[tuple[str, Any, Any]]:
    if wrong := misfits(shapes(own), shapes(given)):
        raise ValidationError(
            f"the {what} state does not fit this configuration: {'; '.join(wrong[:5])}",
            why=f"{len(wrong)} of {len(own)} tensors differ",
            fix="use the model configuration the state was saved with",
        )
    return ((name, own[name], given[name]) for name in own)
