"""Mixtures of experts in a config.json: how many, how they are chosen, and which blocks have them.

Their loss for balance changes no logit, so it is not read; what is written of it are the defaults
of the class. Ours is `model.feed_forward.balance`, of whoever trains.
"""

from __future__ import annotations

from dataclasses import dataclass

from olm_train.extensions.hf.fields import (
    Always,
    ConfigReader,
    Json,
    Number,
    Ours,
    Problems,
    Row,
    Written,
    ours_of,
)
from olm_train.model.config import DecoderConfig
from olm_train.model.mixture import MixtureConfig


@dataclass(frozen=True)
class Experts(Row):
    """`num_experts`, which some versions write as `num_local_experts`."""

    default: int
    theirs = ("num_experts", "num_local_experts")
    field = "feed_forward.n_experts"

    def read(self, given: ConfigReader) -> Ours:
        name, other = self.theirs
        local = given.take(other, int)
        found = given.take(name, int, self.default if local is None else local)
        if local is not None and local != found:
            given.refuse(other, f"is {local}, and {name} is {found}")
        return {self.field: found}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        return {"num_experts": ours_of(config).get(self.field)}


@dataclass(frozen=True)
class NoBias(Row):
    """Nothing but the scores has a say in who is chosen."""

    theirs = ()
    field = "feed_forward.balance"
    says = "`feed_forward.balance` is not `bias`"

    def read(self, given: ConfigReader) -> Ours:
        return {self.field: None}

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        balance = ours_of(config).get(self.field)
        if balance is not None and balance["name"] == "bias":
            problems.refuse(
                self.field,
                "is bias, which has a say in who is chosen",
                "null, aux, sequence_aux or global_aux",
            )
        return {}


@dataclass(frozen=True)
class SparseLayers(Row):
    """Which blocks have experts: all but the first ones.

    Attributes:
        default: `intermediate_size` of the others, where it is absent.
    """

    default: int
    theirs = ("mlp_only_layers", "decoder_sparse_step", "intermediate_size")
    ours = ("feed_forward.first_dense", "feed_forward.dense_hidden_size")

    def read(self, given: ConfigReader) -> Ours:
        layers, width = given.layers(), given.take("intermediate_size", int, self.default)
        step = given.take("decoder_sparse_step", int, 1)
        only = given.take("mlp_only_layers", list[int]) or []
        if step < 1:
            given.refuse("decoder_sparse_step", f"is {step}, less than 1")
            return {}
        dense = [layer in only or (layer + 1) % step > 0 for layer in range(layers)]
        first = (*dense, False).index(False)
        if any(dense[first:]) or (dense and first == layers):
            name = "mlp_only_layers" if only else "decoder_sparse_step"
            given.refuse(name, "leaves other blocks without experts than some first ones")
        return dict(zip(self.ours, (first, width if first else None), strict=True))

    def write(self, config: DecoderConfig, problems: Problems) -> Json:
        ffn = config.feed_forward
        if not isinstance(ffn, MixtureConfig):
            return {}
        return {
            "mlp_only_layers": [*range(ffn.first_dense)],
            "decoder_sparse_step": 1,
            "intermediate_size": ffn.dense_hidden_size or ffn.top_k * ffn.hidden_size,
        }


SOFTMAX_EXPERTS: tuple[Row, ...] = (
    Always("feed_forward", "moe"),
    Number("num_experts_per_tok", "feed_forward.top_k", int, 8),
    Number("norm_topk_prob", "feed_forward.normalize_scores", bool, False),
    Always("feed_forward.scores", "softmax"),
    Always("feed_forward.score_scale", 1.0),
    Always("feed_forward.shared_hidden_size", None),
    NoBias(),
    Written("output_router_logits", False),
)
"""What OLMoE and Qwen 3 MoE share."""
