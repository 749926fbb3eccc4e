"""torch.compile for each block: static shapes, one graph a kind of block, length and mode.

Blocks and not the whole model: blocks alike share one compilation, and FSDP2's hooks stay between
the graphs. There is no limit to how many kinds, lengths and modes a run has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from olm_data.config.convert import Config
from olm_train.model.compiled import CompiledByKind
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig


@dataclass(frozen=True, kw_only=True)
class CompileConfig(Config):
    """How blocks are compiled, with compile_model.

    Attributes:
        mode: torch.compile's. "max-autotune-no-cudagraphs" tries kernels out: a longer start.
        fullgraph: refuse a block that does not compile as one graph, instead of running parts of
            it uncompiled.
    """

    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    fullgraph: bool = True

    def apply(self, blocks: nn.ModuleList, checkpointing: ActivationCheckpointingConfig) -> None:
        """Replace the forward function of the blocks, whatever it is by now, by a compiled one.

        The forward function and not the module: FSDP's hooks stay outside the graph and parameter
        names stay as they are.
        """
        options = {"fullgraph": self.fullgraph, "mode": self.mode}
        for block in blocks:
            for name, call in _CALLS.items():
                if (own := getattr(block, name, None)) is None:  # no block of ours
                    continue
                vars(block)[f"uncompiled_{name}"] = own
                compiled = CompiledByKind(call, owner=block, **options)  # where it is first called
                vars(block)[name] = checkpointing.around_compiled(compiled)


@contextmanager
def uncompiled(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Around calls of other kinds each time, such as texts that grow: nothing is compiled."""
    own = {block: vars(block) for block in blocks if "uncompiled_forward" in vars(block)}
    compiled = {block: each["forward"] for block, each in own.items()}
    try:
        for each in own.values():
            each["forward"] = each["uncompiled_forward"]
        yield
    finally:
        for block, forward in compiled.items():
            vars(block)["forward"] = forward


def _forward(block: Any, *args: Any, **kwargs: Any) -> Any:
    return block.uncompiled_forward(*args, **kwargs)


def _watched(block: Any, *args: Any, **kwargs: Any) -> Any:
    return block.uncompiled_watched(*args, **kwargs)


_CALLS = {"forward": _forward, "watched": _watched}
