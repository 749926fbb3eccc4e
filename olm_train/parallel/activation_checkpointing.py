"""Keep fewer activations for the backward pass and compute them again: memory for time.

    block.forward -> checkpointed block.forward          before it is compiled, before FSDP2

What is computed again has the same bits, so the gradients do not change. Parameter names stay: the
forward function is replaced and not the module.

Blocks draw none, so their generators are not saved either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from olm_data.config.convert import Config
from olm_data.config.hints import Needs, PositiveInt, Proportion
from olm_data.errors import UsageError

DEAR = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
"""Matrix products: dear to compute for the memory of their result, so are the attentions."""
ATTENTION = ("attention", "flash_attn", "_varlen_attn", "flex_attention")


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingConfig(Config):
    """Activation checkpointing.

    Attributes:
        mode: activations that are computed again in the backward pass instead of kept, with the
            same bits: "none"; "full": all but each block's input; "selected_blocks": those of some
            blocks; "selected_ops": all but the results of matrix products and attention; "budget":
            what the compiler chooses under a budget (with `compile_model`).
        block_interval: "selected_blocks": the 1st, this plus 1st, ... block; 2 is every other one.
        activation_memory_budget: "budget": share of the activations that may be kept, 0 to 1.
    """

    mode: Literal["none", "full", "selected_blocks", "selected_ops", "budget"] = "none"
    block_interval: Annotated[PositiveInt | None, Needs("mode", value="selected_blocks")] = None
    activation_memory_budget: Annotated[Proportion | None, Needs("mode", value="budget")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = {"selected_blocks": "block_interval", "budget": "activation_memory_budget"}
        field = needed.get(self.mode)
        if field is not None and getattr(self, field) is None:
            raise UsageError(f"mode {self.mode} needs it", where=field, fix=f"give {field}")

    def check(self, *, compiling: bool) -> None:
        """Check that the blocks are compiled where the compiler is to choose.

        Raises:
            UsageError: they are not.
        """
        if self.mode == "budget" and not compiling:
            raise UsageError(
                "a budget needs compiled blocks",
                where="ac_config.mode",
                fix="set compile_model: true",
            )

    def recomputed(self, n_layers: int) -> float:
        """Return the share of the blocks whose forward pass is taken twice, all of it."""
        if self.mode not in ("full", "selected_blocks"):
            return 0.0
        return math.ceil(n_layers / (self.block_interval or 1)) / n_layers

    def apply(self, blocks: nn.ModuleList) -> None:
        """Replace the forward function of the blocks; not for "budget", see `around_compiled`."""
        if self.mode in ("none", "budget"):
            return
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if self.mode == "selected_ops":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_dear)
        for block in list(blocks)[:: self.block_interval or 1]:
            block.forward = partial(checkpoint, block.forward, **options)
            if hasattr(block, "watched"):
                vars(block)["watched"] = partial(checkpoint, block.watched, **options)

    def around_compiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Let the compiler of `forward` know the budget, while it is called and no longer."""
        budget = self.activation_memory_budget
        if budget is None:
            return forward

        def with_budget(*args: Any, **kwargs: Any) -> Any:
            with torch._functorch.config.patch(activation_memory_budget=budget):
                return forward(*args, **kwargs)

        return with_budget


def _keep_dear(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name = str(getattr(operator, "_opname", operator))
    if name in DEAR or any(part in name for part in ATTENTION):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
