"""A mixture of copies of a dense layer computes what the dense one does, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from olm_data.errors import UsageError
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import init_parameters
from olm_train.model.upcycle import Slices, dense_name, put_copies, refuse_unequal

SIZES: dict[str, Any] = {"vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 4}
DENSE = DecoderConfig(**SIZES, feed_forward={"hidden_size": 40}, init_std=0.2)
EXPERTS: dict[str, Any] = {"name": "moe", "n_experts": 6, "top_k": 2, "hidden_size": 40}
NORMALISED = EXPERTS | {"normalize_scores": True}


def mixture(**options: Any) -> DecoderConfig:
    return DENSE.changed(feed_forward=options)


@pytest.mark.parametrize(
    "options",
    [
        NORMALISED,
        NORMALISED | {"scores": "sigmoid", "score_scale": 2.5},
        NORMALISED | {"first_dense": 1, "dense_hidden_size": 40, "balance": None},
        NORMALISED | {"top_k": 1},
        EXPERTS | {"top_k": 6},
    ],
)
@torch.no_grad()
def test_logits_are_those_of_the_dense_model(options: dict[str, Any]) -> None:
    dense, model = Decoder(DENSE), Decoder(mixture(**options))
    init_parameters(dense, 1)
    init_parameters(model, 2)
    refuse_unequal(DENSE, model.config)
    source = dict(dense.named_parameters())

    def read(name: str, where: Slices) -> Tensor:
        return source[name][where]

    for name, parameter in model.named_parameters():
        whole = tuple(slice(0, size) for size in parameter.shape)
        if dense_name(name) is not None:
            put_copies(parameter.data, whole, name, read, model.config)
        elif "router" not in name:
            parameter.copy_(source[name])
    ids = torch.randint(61, (2, 30), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(model(ids), dense(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (EXPERTS, "feed_forward.normalize_scores is false"),
        (EXPERTS | {"top_k": 6, "scores": "sigmoid"}, "feed_forward.normalize_scores is false"),
        (NORMALISED | {"hidden_size": 48}, "feed_forward.hidden_size is 48, not 40"),
        (NORMALISED | {"shared_hidden_size": 8}, "feed_forward.shared_hidden_size"),
        (
            NORMALISED | {"first_dense": 1, "dense_hidden_size": 48},
            "feed_forward.dense_hidden_size is 48, not 40",
        ),
        ({"name": "swiglu", "hidden_size": 40}, "is no mixture of experts"),
    ],
)
def test_a_mixture_with_other_logits_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        refuse_unequal(DENSE, mixture(**options))


def test_so_is_one_that_differs_elsewhere() -> None:
    config = mixture(**NORMALISED)
    with pytest.raises(UsageError, match=r"model\.head\.tied is True, not False"):
        refuse_unequal(DENSE, config.changed(head={"tied": True}))
    refuse_unequal(DENSE.changed(attention={"backend": "sdpa"}), config)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ({"name": "geglu", "hidden_size": 40}, "is geglu"),
        ({"hidden_size": 40, "bias": True}, "is swiglu with biases"),
        (NORMALISED, "is moe"),
    ],
)
def test_only_swiglu_becomes_experts(layer: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"the feed-forward layer of the weights {said}"):
        refuse_unequal(DENSE.changed(feed_forward=layer), mixture(**NORMALISED))
