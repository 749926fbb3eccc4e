"""How initial values, rates and products change with a model's size, so that tuned ones stay right.

    d_model / base.d_model = m_N, n_layers / base.n_layers = m_L    (1 and 1 at base size)
    name of a parameter --ROLES--> role --TABLES--> m_N^a * m_L^b for each quantity
    options of train.yaml, as tuned at base size, times these -> what a model of this size takes

The numbers are exponents of what `sp` has. Sources: `mup`, `completep` (with alpha = 1): Dey et al.
2025 (arXiv 2505.01618, Table 1) and its code, EleutherAI/nanoGPT-mup; `muon_mup`: karpathy/nanochat
PR 644. AdamW's eps goes as gradients do, outside of blocks too (arXiv 2512.22382): it is m_N^-1 for
final norm, embeddings and head. Gains of QK-norms are shared by heads, of which there are m_N.

Rates are for updates whose entries do not depend on their number: AdamW's, Lion's. A matrix that is
orthogonalised takes m_N^gain more, and as much less decay: rate times decay is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from olm_data.config.convert import Config
from olm_data.errors import UsageError

Name = Literal["sp", "mup", "completep", "muon_mup"]
Exponents = tuple[float, float]
"""Of m_N and of m_L."""

SAME: Exponents = (0, 0)


class Rule(NamedTuple):
    """What a role takes, as exponents: deviation of initial values, learning rate, weight decay,
    and eps of AdamW."""

    init: Exponents = SAME
    rate: Exponents = SAME
    decay: Exponents = SAME
    eps: Exponents = SAME


@dataclass(frozen=True)
class Table:
    """A parametrization.

    Attributes:
        rules: of roles.
        residual: what a block adds to the stream is multiplied by; attention and feed-forward.
        logits: normalised states are multiplied by, before the head.
        attention: products of queries and keys are divided by head_dim, not by its square root.
    """

    rules: Mapping[str, Rule] = field(default_factory=dict)
    residual: Exponents = SAME
    logits: Exponents = SAME
    attention: bool = False


_MUP = {
    "embeddings": Rule(eps=(-1, 0)),
    "hidden": Rule(init=(-0.5, 0), rate=(-1, 0), decay=(1, 0), eps=(-1, 0)),
    "hidden out": Rule(init=(-0.5, 0), rate=(-1, 0), decay=(1, 0), eps=(-1, 0)),
    "hidden vectors": Rule(eps=(-1, 0)),
    "qk norms": Rule(),
    "final norm": Rule(eps=(-1, 0)),
    "head": Rule(eps=(-1, 0)),
}
TABLES: Mapping[str, Table] = {
    "sp": Table(),
    "mup": Table(_MUP, logits=(-1, 0), attention=True),
    "completep": Table(
        _MUP
        | {
            "hidden": Rule(init=(-0.5, 0), rate=(-1, 0), decay=(1, 0), eps=(-1, -1)),
            # sp has 1 / sqrt(2 n_layers) here: of the base's layers, since the branch shrinks
            "hidden out": Rule(init=(-0.5, 0.5), rate=(-1, 0), decay=(1, 0), eps=(-1, -1)),
            "hidden vectors": Rule(eps=(-1, -1)),
            "qk norms": Rule(eps=(0, -1)),
        },
        residual=(0, -1),
        logits=(-1, 0),
        attention=True,
    ),
    "muon_mup": Table(
        _MUP | {"head": Rule(init=(-0.5, 0), eps=(-1, 0))},
        logits=(-1, 0),
    ),
}

ROLES = {
    "embeddings": ("embeddings.weight", "position_embeddings.weight"),
    "head": ("lm_head.weight",),
    "final norm": ("norm.weight", "norm.bias"),
    "hidden": (
        "blocks.*.attention.w_qkv.weight",
        "blocks.*.feed_forward.w_up.weight",
        "blocks.*.feed_forward.w_gate_up.weight",
    ),
    "hidden out": ("blocks.*.attention.w_out.weight", "blocks.*.feed_forward.w_down.weight"),
    "qk norms": ("blocks.*.attention.[qk]_norm.*",),
    "hidden vectors": (
        "blocks.*.w_*.bias",
        "blocks.*.*attention_norm.*",
        "blocks.*.*feed_forward_norm.*",
    ),
}
"""Names of parameters, or patterns of them."""

GAINS = {"rms_norm": 0.5, "spectral_norm": 1.0, "none": 1.0}
"""Exponent of m_N that the rate of an orthogonalised matrix takes, by `adjust_lr` of the optimiser:
its update multiplies a state by this much less than one of AdamW's of the same rate."""


@dataclass(frozen=True, kw_only=True)
class BaseConfig(Config):
    """The size that options were tuned at.

    Attributes:
        d_model: width there.
        n_layers: number of blocks there.
        head_dim: size of a head there: products of queries and keys are multiplied by its square
            root / head_dim, as by `sp` there. Default: by 1 / head_dim, as it was published.
    """

    d_model: Annotated[int, Meta(ge=1, le=1 << 18)]
    n_layers: Annotated[int, Meta(ge=1, le=1 << 13)]
    head_dim: Annotated[int, Meta(ge=1, le=1 << 13)] | None = None


class Scaling(NamedTuple):
    """A parametrization at one size.

    Attributes:
        name: of it.
        width, depth: m_N and m_L.
        base_head: size of a head that attention scales from.
    """

    name: Name
    width: float
    depth: float
    base_head: int

    @property
    def table(self) -> Table:
        """Its exponents."""
        return TABLES[self.name]

    def power(self, exponents: Exponents) -> float:
        """Return what something is multiplied by; exactly 1 at base size."""
        return float(self.width ** exponents[0] * self.depth ** exponents[1])

    @property
    def residual(self) -> float:
        """What attention and feed-forward are multiplied by where they join the stream."""
        return self.power(self.table.residual)

    @property
    def logits(self) -> float:
        """What normalised states are multiplied by before the head."""
        return self.power(self.table.logits)

    def attention(self, head_dim: int) -> float | None:
        """Return what products of queries and keys are multiplied by; None: 1 / sqrt(head_dim)."""
        if not self.table.attention or self.base_head == head_dim:
            return None
        return float(self.base_head**0.5 / head_dim)

    def rule(self, name: str) -> Rule:
        """Return the rule of a parameter; of `sp` that nothing changes.

        Raises:
            UsageError: it has no role.
        """
        return Rule() if self.name == "sp" else self.table.rules[self.role(name)]

    def role(self, name: str) -> str:
        """Return the role of a parameter.

        Raises:
            UsageError: it has none.
        """
        for role, patterns in ROLES.items():
            if any(fnmatchcase(name, pattern) for pattern in patterns):
                return role
        raise UsageError(
            f"the parametrization {self.name} has no rule for the parameter {name}",
            where="model.parametrization",
            why="nobody has shown how its initial values and its rate change with the model's size",
            fix="set model.parametrization: sp, and leave model.base out",
        )

    def init(self, name: str) -> float:
        """Return what the deviation of initial values is multiplied by."""
        return self.power(self.rule(name).init)

    def options(self, name: str, gain: float) -> tuple[float, float, float]:
        """Return what rate, weight decay and eps are multiplied by.

        Args:
            gain: of a matrix that is orthogonalised, see `GAINS`; else 0.
        """
        rule = self.rule(name)
        rate, decay = self.power(rule.rate), self.power(rule.decay)
        more = self.power((gain, 0))
        return rate * more, decay / more, self.power(rule.eps)
