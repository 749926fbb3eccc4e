"""Matrix products of the blocks' linear layers in 8 bits, by torchao.

    x, weight in bfloat16 --divided by their scales--> 8 bits --product--> bfloat16

So are both products of the backward pass. A layer's product is replaced (`LinearLayer.product`),
never the layer: weights and their names, checkpoints, optimiser and the estimate of memory are
those of a run without it. Scales are those of the tensors at hand, a whole weight and this rank's
tokens, so nothing is kept from step to step. Ranks of tensor parallelism have parts of a tensor,
and the scales of the whole one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from olm_data.config.convert import Config
from olm_data.counts import counted
from olm_data.errors import UsageError
from olm_data.extras import needs
from olm_train.model.decoder import Decoder
from olm_train.model.layers import LinearLayer
from olm_train.model.mixture import Experts
from olm_train.model.shards import local_part
from olm_train.parallel.tensor import ByColumns, ByRows, Products

PLACE = "train_module.float8_config"


@dataclass(frozen=True, kw_only=True)
class Float8Config(Config):
    """Linear layers of the blocks in 8 bits, but those of the first and the last block.

    Attributes:
        ao_recipe: torchao's: "tensorwise", one scale for each tensor, the fastest; "rowwise", one
            for each row or column; "rowwise_with_gw_hp", the same with gradients of weights in
            bfloat16, the most exact; "mxfp8", one for each 32 elements.
        emulate: round as the device would, and multiply what is rounded in the usual way: on any
            device, slowly, to see what becomes of a loss.
    """

    ao_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"]
    emulate: bool = False

    @property
    def multiple(self) -> int:
        """What sizes of a product are multiples of: of each matrix, and tokens of a rank."""
        return 32 if self.ao_recipe == "mxfp8" else 16

    def check_tokens(self, tokens: int) -> None:
        """Refuse a number of tokens of a rank that weights' gradients cannot be summed over.

        Raises:
            UsageError: it is no multiple.
        """
        if tokens % self.multiple:
            raise UsageError(
                f"float8 products of {self.ao_recipe} are over a multiple of {self.multiple} "
                f"tokens, and a rank has {tokens:,} at once",
                where="train_module.rank_microbatch_size",
            )

    def choose(self, model: Decoder, dtype: torch.dtype) -> Chosen:
        """Return which layers of a model that computes in `dtype` are converted.

        Raises:
            UsageError: none, or another dtype than bfloat16.
        """
        if dtype is not torch.bfloat16:
            raise UsageError(
                f"float8 products give bfloat16, and the blocks compute in {str(dtype)[6:]}",
                where="train_module.dp_config.param_dtype",
                fix="set it to bfloat16, or leave float8_config out",
            )
        chosen = Chosen(self.ao_recipe, {}, {})
        last = len(model.blocks) - 1
        blocks = {n: block for n, block in enumerate(model.blocks) if block is not None}  # here
        for number, block in blocks.items():
            for name, layer in block.named_modules():
                if isinstance(layer, Experts):
                    chosen.leave("experts", name)
                if not isinstance(layer, LinearLayer):
                    continue
                if number in (0, last):
                    chosen.leave("of the first and the last block", name)
                elif any(size % self.multiple for size in layer.weight.shape):
                    chosen.leave(f"with sizes that are no multiples of {self.multiple}", name)
                else:
                    chosen.converted[f"blocks.{number}.{name}"] = layer
        if not chosen.converted and len(blocks) > last:
            raise UsageError(
                f"float8_config converts none of the model's linear layers: {chosen.rest}",
                where=PLACE,
                fix="leave it out",
            )
        return chosen

    def apply(self, model: Decoder, device: torch.device, dtype: torch.dtype) -> None:
        """Give the chosen layers their product.

        Raises:
            UsageError: see `choose`; or torchao is not installed, or the device has no such
                products.
        """
        chosen = self.choose(model, dtype)
        if not self.emulate:
            self._require(device)
        product: Any = None
        for name, layer in chosen.converted.items():
            if isinstance(layer.product, (ByRows, ByColumns)):  # tensor parallelism has cut it
                self._require_multiple(name, local_part(layer.weight))
                products = _OfParts(self._layer(), layer.product, device)
                layer.product = replace(layer.product, products=products)
            else:
                layer.product = product = product or self._product()

    def _require_multiple(self, name: str, part: Tensor) -> None:
        if any(size % self.multiple for size in part.shape):
            raise UsageError(
                f"a rank has {' x '.join(map(str, part.shape))} of {name}, and float8 products are "
                f"of multiples of {self.multiple}",
                where="train_module.tp_config.degree",
                fix="set a smaller one, or leave float8_config out",
            )

    def _require(self, device: torch.device) -> None:
        newer = self.ao_recipe == "mxfp8"
        least, kind = ((10, 0), "Blackwell") if newer else ((8, 9), "Ada, Hopper")
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= least:
            return
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise UsageError(
            f"{name} has no products of {self.ao_recipe}",
            where=f"{PLACE}.ao_recipe",
            why=f"they need compute capability {least[0]}.{least[1]}: {kind} or newer",
            fix="leave float8_config out, or set emulate: true to see what becomes of the loss",
        )

    def _layer(self) -> Any:
        """Return torchao's layer, without weights."""
        with needs("float8_config", where=PLACE):
            import torchao  # noqa: F401
        layer = nn.Linear(1, 1, bias=False, device="meta")
        if self.ao_recipe == "mxfp8":
            from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
            from torchao.quantization.quantize_.common import KernelPreference

            kernels = KernelPreference.EMULATED if self.emulate else KernelPreference.AUTO
            return MXFP8Linear(1, 1, bias=False, device="meta", kernel_preference=kernels)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(self.ao_recipe)
        return convert_to_float8_training(layer, config=replace(config, emulate=self.emulate))

    def _product(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        """Return a function of x, weight and bias: torchao's layer, with weights lent to it."""
        layer = self._layer()

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out: Tensor = torch.func.functional_call(layer, {"weight": weight.to(x.dtype)}, (x,))
            return out if bias is None else out + bias.to(x.dtype)

        return product


class _OfParts(Products):
    """Products in 8 bits with a rank's part of a matrix, with the scales of the whole one.

    torchao's, but that the largest element of a tensor is that of all ranks, where they have other
    parts of it; so is that of a row which a product sums over, where each has a part of the row.

    Args:
        layer: torchao's, of a recipe.
        product: that it is part of.
        device: of the ranks.
    """

    def __init__(self, layer: Any, product: ByRows | ByColumns, device: torch.device) -> None:
        self._config, self._products = layer.config, layer.linear_mm_config
        self._mesh = DeviceMesh.from_group(product.ranks.group, device.type)
        self._by_rows = isinstance(product, ByRows)

    def out(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of, apart = self._config, not self._by_rows
        a = self._cast(x.flatten(0, -2), "input", of.cast_config_input, -1, apart)
        b = self._cast(weight.t(), "weight", of.cast_config_weight, 0, apart)
        out = torch.mm(a, b).unflatten(0, x.shape[:-1])
        return out if bias is None else out + bias

    def of_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        of, apart = self._config, self._by_rows
        a = self._cast(grad.flatten(0, -2), "grad_output", of.cast_config_grad_output, -1, apart)
        b = self._cast(weight.t(), "weight", of.cast_config_weight_for_grad_input, -1, apart)
        return torch.mm(a, b.t()).unflatten(0, grad.shape[:-1])

    def of_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        of = self._config  # each rank has all tokens, which it sums over
        upstream = of.cast_config_grad_output_for_grad_weight
        a = self._cast(grad, "grad_output", upstream, 0, apart=False)
        return torch.mm(
            a.t(), self._cast(x, "input", of.cast_config_input_for_grad_weight, 0, apart=False)
        )

    def _cast(self, x: Tensor, role: str, how: Any, dim: int, apart: bool) -> Tensor:
        """Return x in 8 bits, if it is to be; `apart`: ranks have other parts along `dim`."""
        from torchao.float8.config import ScalingGranularity, ScalingType
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

        if how.scaling_type is ScalingType.DISABLED:
            return x
        whole = how.scaling_granularity is ScalingGranularity.TENSORWISE
        cast: Tensor = hp_tensor_to_float8_dynamic(
            x,
            how.target_dtype,
            self._products,
            reduce_amax=whole or apart,
            gemm_input_role=GemmInputRole(role),
            device_mesh=self._mesh,
            scaling_granularity=how.scaling_granularity,
            axiswise_dim=None if whole else dim,
            round_scales_to_power_of_2=self._config.round_scales_to_power_of_2,
        )
        return cast


class Chosen(NamedTuple):
    """Which linear layers are converted, and names within a block of others, by the reason."""

    recipe: str
    converted: dict[str, LinearLayer]
    left: dict[str, list[str]]

    def leave(self, why: str, name: str) -> None:
        """Count a layer that stays as it is."""
        self.left.setdefault(why, []).append(name)

    @property
    def rest(self) -> str:
        """Those left out, counted and named."""
        return "; ".join(
            f"{len(names)} {why} ({', '.join(dict.fromkeys(names))})"
            for why, names in self.left.items()
        )

    def __str__(self) -> str:
        names = dict.fromkeys(name.split(".", 2)[2] for name in self.converted)
        layers = counted(len(self.converted), "linear layer")
        return f"float8 {self.recipe}: {layers} ({', '.join(names)}); not: {self.rest}"
