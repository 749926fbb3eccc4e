"""A mixture of experts out of a dense model: each expert is a copy of its feed-forward layer.

    shapes of both --refuse_unequal--> logits are equal, or an error that names the field
    the part of a parameter at home here <--put-- rows of the dense model; routers stay as drawn

The weights of a token's experts sum to `score_scale`, and the last map of each is divided by it: so
copies give together what the dense layer gave (Komatsuzaki et al., 2022, arXiv 2212.05055).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from olm_data.bounded_json import JsonObject
from olm_data.config.convert import as_dict
from olm_data.errors import UsageError
from olm_train.model.config import DecoderConfig
from olm_train.model.feed_forward import SwiGLUConfig
from olm_train.model.mixture import MixtureConfig
from olm_train.model.presets import by_name

Slices = tuple[slice, ...]
OPTION = "trainer.load_upcycle"


def begun_feed_forward(dense: DecoderConfig) -> JsonObject:
    """Return what follows for the experts from the layer that they are copies of.

    Raises:
        UsageError: no expert is such a layer.
    """
    layer = dense.feed_forward
    if not isinstance(layer, SwiGLUConfig) or layer.bias:
        name, biased = getattr(layer, "name", type(layer).__name__), getattr(layer, "bias", False)
        said = f"{name}{' with biases' * bool(biased)}"
        raise UsageError(
            f"the feed-forward layer of the weights is {said}",
            where=OPTION,
            why="experts are swiglu without biases",
            fix="begin with another model, or leave load_upcycle out",
        )
    return {"name": "moe", "hidden_size": layer.width(dense)}


def refuse_unequal(dense: DecoderConfig, config: DecoderConfig) -> None:
    """Refuse a mixture whose first logits would not be those of the dense model.

    Args:
        dense: shape of the weights.
        config: of the model to train.

    Raises:
        UsageError: names what prevents it.
    """
    wanted, experts = begun_feed_forward(dense), config.feed_forward
    if not isinstance(experts, MixtureConfig):
        raise UsageError(
            "model.feed_forward is no mixture of experts",
            where=OPTION,
            fix="give model.feed_forward: {name: moe, ...}, or leave load_upcycle out",
        )
    width, wrong = wanted["hidden_size"], []
    if experts.hidden_size != width:
        wrong.append(f"hidden_size is {experts.hidden_size}, not {width}")
    if experts.first_dense and experts.dense_hidden_size != width:
        wrong.append(f"dense_hidden_size is {experts.dense_hidden_size}, not {width}")
    if experts.shared_hidden_size is not None:
        wrong.append("shared_hidden_size adds a layer that all tokens pass")
    all_of_softmax = experts.scores == "softmax" and experts.top_k == experts.n_experts
    if not (experts.normalize_scores or all_of_softmax):
        wrong.append("normalize_scores is false: weights of a token's experts sum to less than 1")
    wrong = [f"feed_forward.{each}" for each in wrong]
    ours = by_name(as_dict(config))
    for name, value in by_name(as_dict(dense)).items():
        free = name.startswith("feed_forward") or name in ("attention.backend", "init_std")
        if not free and ours.get(name) != value:
            wrong.append(f"{name} is {ours.get(name)}, not {value}")
    if wrong:
        raise UsageError(
            "the mixture would not begin as the dense model: model." + "; model.".join(wrong),
            where=OPTION,
            why="its logits would be others",
            fix="change these fields of model",
        )


def dense_name(name: str) -> str | None:
    """Return the parameter of the dense model that one of the experts is copies of, None: of none.

    `blocks.3.feed_forward.experts.w_down` -> `blocks.3.feed_forward.w_down.weight`
    """
    block, experts, leaf = name.partition(".experts.")
    return f"{block}.{leaf}.weight" if experts else None


@torch.no_grad()
def put_copies(
    part: Tensor,
    where: Slices,
    name: str,
    read: Callable[[str, Slices], Tensor],
    config: DecoderConfig,
) -> None:
    """Fill what is at home here of a parameter of the experts.

    Args:
        part: [experts, rows, columns], or a part of each.
        where: it lies in the whole.
        name: of the parameter.
        read: gives a block of a parameter of the dense model.
        config: of the mixture.
    """
    dense, experts = dense_name(name), config.feed_forward
    assert dense is not None
    assert isinstance(experts, MixtureConfig)
    part.copy_(read(dense, where[1:]))  # the same for each expert
    if name.endswith(".w_down"):
        part /= experts.score_scale
