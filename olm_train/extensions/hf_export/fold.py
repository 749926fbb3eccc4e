"""What a parametrization multiplies, folded into weights: no model of transformers has it.

    logits             -> gain and bias of the final norm
    residual branches  -> norms after attention and feed-forward; without them, their last matrices
    scale of attention -> gain of the queries' norm; without it, rows of queries

So a tied head, a softcap and biases come out right. The weights are others, the logits are not.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

from torch import Tensor

from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder, build_decoder

_AFTER = ("blocks.*.post_*_norm.*",)
_LAST = ("blocks.*.attention.w_out.*", "blocks.*.feed_forward.w_down.*")


def folded(config: DecoderConfig) -> DecoderConfig:
    """Return the shape of the model whose weights are folded."""
    return replace(config, parametrization="sp", base=None)


class Fold:
    """What each weight of a model is multiplied by.

    Args:
        config: its shape.
    """

    def __init__(self, config: DecoderConfig) -> None:
        scaling, attention = config.scaling, config.attention
        scale = scaling.attention(config.head_size)
        queries = 1.0 if scale is None else scale * config.head_size**0.5
        on_queries = ("attention.q_norm" if attention.qk_norm else "attention.w_qkv") + ".*"
        self._factors = {
            "norm.*": scaling.logits,
            f"blocks.*.{on_queries}": queries,
            **dict.fromkeys(_AFTER if config.block.after else _LAST, scaling.residual),
        }
        self._rows = config.n_heads * config.head_size
        self._centre = 1.0 - config.norm.initial_weight

    def rows(self, name: str, rows: Tensor, first: int = 0) -> Tensor:
        """Return rows of a weight, folded.

        Args:
            name: of the parameter.
            rows: of it; or entries.
            first: number of the first of them.
        """
        for pattern, factor in self._factors.items():
            if factor == 1.0 or not fnmatchcase(name, pattern):
                continue
            if "w_qkv" in pattern:
                end = max(0, self._rows - first)
                rows = rows.clone()
                rows[:end] *= factor
            elif "norm" in pattern and name.endswith(".weight"):
                rows = (rows + self._centre) * factor - self._centre
            else:
                rows = rows * factor
        return rows

    def model(self, model: Decoder) -> Decoder:
        """Return a model, folded; it computes the same."""
        found = build_decoder(folded(model.config), device="meta").eval()
        tensors = {name: self.rows(name, each) for name, each in model.state_dict().items()}
        found.load_state_dict(tensors, assign=True)
        return found
