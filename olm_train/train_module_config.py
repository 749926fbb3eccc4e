"""Options of a step: everything but the model's shape and the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from olm_data.config.convert import Config
from olm_data.config.hints import Needs, Parts, PositiveFloat
from olm_data.errors import UsageError
from olm_train.data.dealing import Dealing, Windows, require_equal_parts
from olm_train.model.config import DecoderConfig
from olm_train.model.loss_config import LossChoice, LossConfig, OwnLoss
from olm_train.optim import AnyOptim
from olm_train.optim.adamw import AdamWConfig
from olm_train.optim.base import OptimConfig
from olm_train.optim.given import NamedOptim
from olm_train.optim.schedule import AnySchedule, Constant
from olm_train.optim.schedule_base import LRScaling, LRSchedule
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.parallel.compiling import CompileConfig
from olm_train.parallel.config import (
    ContextParallelConfig,
    DataParallelConfig,
    ExpertParallelConfig,
    PipelineParallelConfig,
    TensorParallelConfig,
)
from olm_train.parallel.float8 import Float8Config
from olm_train.parallel.mesh import Mesh
from olm_train.stability.gate import NonFinite


@dataclass(frozen=True, kw_only=True)
class TransformerTrainModuleConfig(Config):
    """Everything about a step but the model's shape and the data.

    Attributes:
        rank_microbatch_size: tokens a rank takes through forward and backward at once; a multiple
            of the mixture's sequence length. With cp_config and tp_config their `degree` ranks
            together.
        optim: the optimiser.
        scheduler: learning-rate schedule; default: the peak rate throughout.
        lr_batch_scaling: how the learning rate grows with the batch of a [batch-size
            schedule](#batch-size-schedules): with its root, the rule for Adam; in proportion to it,
            that for gradient descent; or `none`: not.
        max_grad_norm: gradients are scaled down to this global 2-norm; null: never.
        dp_config: data parallelism and precision.
        pp_config: pipeline parallelism: ranks have [other
            layers](../how-to/train-many-layers.md). Default: each has all.
        cp_config: context parallelism: several ranks [share each
            micro-batch](../how-to/train-long-rows.md). Default: none do.
        tp_config: tensor parallelism: several ranks [share each matrix
            product](../how-to/train-on-many-gpus.md#wide-models). Default: none do.
        ep_config: expert parallelism: [experts are dealt to
            ranks](../how-to/train-experts.md#on-many-gpus). Default: each rank computes with all.
        float8_config: linear layers of the blocks [in 8
            bits](../how-to/low-throughput.md#products-in-8-bits). Default: none.
        loss: cross entropy, its implementation and the z-loss.
        ac_config: activation checkpointing.
        compile_model: `torch.compile` for each block, static shapes, and for the loss if
            `loss.name` is `auto`; auto: [on CUDA](#what-auto-stands-for).
        compile_config: how blocks are compiled.
        float32_matmul_precision: of matrix products of fp32 tensors: "highest" is fp32, "high"
            allows TF32, "medium" bf16, where the device has them; auto: [high on
            CUDA](#what-auto-stands-for). A setting of the process.
        non_finite: what happens where loss or gradient norm is NaN or infinite, see
            [below](#when-loss-or-gradient-is-not-finite).
    """

    rank_microbatch_size: int
    optim: Annotated[AnyOptim, Parts(OptimConfig, "olm_train.optimizers", NamedOptim)] = field(
        default_factory=AdamWConfig
    )
    scheduler: Annotated[AnySchedule, Parts(LRSchedule, "olm_train.schedulers")] = field(
        default_factory=Constant
    )
    lr_batch_scaling: LRScaling = LRScaling.sqrt
    max_grad_norm: PositiveFloat | None = 1.0
    dp_config: DataParallelConfig = field(default_factory=DataParallelConfig)
    pp_config: PipelineParallelConfig | None = None
    cp_config: ContextParallelConfig | None = None
    tp_config: TensorParallelConfig | None = None
    ep_config: ExpertParallelConfig | None = None
    float8_config: Float8Config | None = None
    loss: Annotated[LossConfig, Parts(OwnLoss, "olm_train.losses")] = field(
        default_factory=LossConfig
    )
    ac_config: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    compile_model: bool | Literal["auto"] = "auto"
    compile_config: Annotated[CompileConfig, Needs("compile_model")] = field(
        default_factory=CompileConfig
    )
    float32_matmul_precision: Literal["auto", "highest", "high", "medium"] = "auto"
    non_finite: NonFinite = NonFinite.halt

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ac_config.check(compiling=bool(self.compile_model))
        tokens = self.rank_microbatch_size
        for name in ("cp_config", "tp_config"):
            degree = self._degree(name)
            require_equal_parts(tokens, degree, f"train_module.{name}.degree")
            tokens //= degree
        if self.float8_config is not None:
            self.float8_config.check_tokens(tokens * self._degree("tp_config"))
            if self.tp_config is not None and self.float8_config.ao_recipe == "mxfp8":
                raise UsageError(
                    "tp_config does not go with ao_recipe: mxfp8",
                    where="train_module.float8_config.ao_recipe",
                    why="torchao has its three products as one, which would keep the tokens of all "
                    "ranks between forward and backward",
                    fix="set another recipe, or leave tp_config out",
                )

    @property
    def sharers(self) -> int:
        """Ranks that share a micro-batch."""
        return self._degree("cp_config") * self._degree("tp_config")

    @property
    def parted(self) -> int:
        """Ranks that have other weights: experts, or parts of matrices."""
        return math.lcm(self._degree("ep_config"), self._degree("tp_config"))

    def chosen_loss(self, model: DecoderConfig) -> LossChoice:
        """Return the loss of a model; where ranks share its logits, each has a part of them."""
        return self.loss.choose(
            model,
            microbatch=self.rank_microbatch_size // self._degree("tp_config"),
            compiling=self.compile_model is True,
        )

    def _degree(self, option: str) -> int:
        config = getattr(self, option)
        return 1 if config is None else int(config.degree)

    def mesh(self, world_size: int, nodes: int = 1) -> Mesh:
        """Return which rank of a run does what; see `DataParallelConfig.mesh`."""
        degrees = {axis: self._degree(f"{axis}_config") for axis in ("pp", "cp", "tp", "ep")}
        return self.dp_config.mesh(world_size, nodes, **degrees)

    def dealing(self, windows: Windows, rank: int) -> Dealing | None:
        """Return how ranks share micro-batches; None: they do not.

        Args:
            windows: of the layers.
            rank: which of those that share one this is.
        """
        context = self.cp_config
        if context is None:
            return None
        needed = context.exchange == "needed"
        return Dealing(context.degree, tuple(windows), rank if needed else None)

    def check_schedule(self, world_size: int) -> None:
        """Refuse options that do not go with a schedule that computes gradients of weights apart.

        Raises:
            UsageError: which one, why, and what to set instead.
        """
        pipeline, dp = self.pp_config, self.dp_config
        if pipeline is None or not pipeline.splits_backward:
            return
        wraps = dp.shards and world_size > pipeline.degree
        found = {
            "compile_model: true": (self.compile_model is True, "set it to false"),
            "ac_config.mode: selected_ops": (
                self.ac_config.mode == "selected_ops",
                "set it to full or none",
            ),
            f"dp_config.reshard_after_forward: {str(dp.reshard_after_forward).lower()}": (
                wraps and dp.reshard_after_forward is not False,
                "set it to false",
            ),
        }
        for what, (wrong, fix) in found.items():
            if wrong:
                raise UsageError(
                    f"the schedule {pipeline.schedule} does not go with {what}",
                    where=f"train_module.{what.partition(':')[0]}",
                    why="it computes gradients of weights later than those of activations, from "
                    "what the forward pass kept",
                    fix=f"{fix}, or set pp_config.schedule: interleaved_1f1b",
                )
