"""A cache changes nothing: logits of tokens fed one by one are those of the whole text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.model_options import CONFIG, EXPERTS, FAMILIES, stirred

from olm_train.extensions.generate.runner import (
    CachedRunner,
    TextRunner,
    WholeRunner,
    knows_cache,
    runner_of,
)
from olm_train.model.block import Block
from olm_train.model.decoder import Decoder
from olm_train.model.head import Head
from olm_train.model.rope import Llama3Scaling, PositionInterpolation, YaRNScaling

CPU = torch.device("cpu")
SCALINGS = [
    None,
    PositionInterpolation(factor=4),
    Llama3Scaling(factor=8, old_context_len=32),
    YaRNScaling(factor=4, old_context_len=64),
]
window = st.one_of(st.just(-1), st.integers(1, 12))
shapes = st.fixed_dictionaries(
    {
        "n_kv_heads": st.sampled_from([1, 2, 4]),
        "attention": st.fixed_dictionaries(
            {
                "sliding_window": st.one_of(st.none(), st.tuples(window, window)),
                "qk_norm": st.sampled_from([None, "head", "full"]),
                "softcap": st.sampled_from([None, 0.5]),
                "query_pre_attn_scalar": st.sampled_from([None, 3.0]),
            }
        ),
        "positions": st.fixed_dictionaries(
            {
                "scaling": st.sampled_from(SCALINGS),
                "no_rope_layer_interval": st.sampled_from([None, 2]),
                "theta_windowed": st.sampled_from([None, 50.0]),
            }
        ),
        "head": st.fixed_dictionaries({"softcap": st.sampled_from([None, 5.0])}),
        "norm": st.fixed_dictionaries({"zero_centred": st.booleans()}),
    }
).map(
    lambda shape: (
        shape
        if shape["attention"]["sliding_window"]
        else shape | {"positions": shape["positions"] | {"theta_windowed": None}}
    )
)
texts = st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=20), min_size=1, max_size=4)


def same(prompts: list[list[int]], more: int, leave: int, model: Decoder) -> None:
    """Feed random tokens to both runners; a row leaves and another comes on the way."""
    runners: list[TextRunner] = [CachedRunner(model, CPU), WholeRunner(model, CPU)]
    draw = torch.Generator().manual_seed(len(prompts))

    def agree(values: list[torch.Tensor]) -> None:
        torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=1e-5)

    agree([runner.prefill(prompts)[0] for runner in runners])
    rows = len(prompts)
    for step in range(more):
        if step == leave:
            late = [[1, 2, 3, 4, 5, 6, 7]]
            for runner in runners:
                runner.remove(0)
            agree([runner.prefill(late)[0] for runner in runners])
        tokens = torch.randint(50, (rows,), generator=draw).tolist()
        agree([runner.decode(tokens) for runner in runners])


@torch.no_grad()
@settings(deadline=None, max_examples=25)
@given(shapes, texts, st.integers(1, 24), st.integers(0, 10))
def test_cached_logits_are_those_of_the_whole_text(
    shape: dict[str, Any], prompts: list[list[int]], more: int, leave: int
) -> None:
    same(prompts, more, leave, stirred(CONFIG.changed(**shape)))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_those_of_whole_families_too(family: str) -> None:
    model = stirred(CONFIG.changed(**FAMILIES[family]))
    same([[3], [5, 6, 7, 8, 9, 10, 11, 12], [1, 2]], 14, 3, model)


@torch.no_grad()
@pytest.mark.parametrize("experts", EXPERTS, ids=str)
def test_those_of_experts_too(experts: dict[str, Any]) -> None:
    model = stirred(CONFIG.changed(**experts))
    assert knows_cache(model)
    same([[3], [5, 6, 7, 8, 9, 10, 11, 12], [1, 2]], 14, 3, model)


@torch.no_grad()
def test_the_whole_text_is_what_the_model_says() -> None:
    model = stirred(CONFIG)
    logits, _ = WholeRunner(model, CPU).prefill([[4, 5, 6], [7, 8]])
    for row, ids in zip(logits, ([4, 5, 6], [7, 8]), strict=True):
        torch.testing.assert_close(row, model(torch.tensor([ids]))[0, -1], rtol=1e-5, atol=1e-5)


class OwnBlock(Block):
    """Looks at the token before, besides its attention."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x, *args, **kwargs) + x.roll(1, dims=1)


def test_a_model_that_mixes_tokens_by_itself_has_no_cache() -> None:
    model = stirred(CONFIG)
    assert isinstance(runner_of(model, CPU), CachedRunner)
    for block in model.blocks:
        block.__class__ = OwnBlock
    assert not knows_cache(model)
    assert isinstance(runner_of(model, CPU), WholeRunner)


@torch.no_grad()
def test_idle_leaves_the_texts_alone() -> None:
    runner = CachedRunner(stirred(CONFIG), CPU)
    runner.prefill([[1, 2, 3]])
    other = CachedRunner(stirred(CONFIG), CPU)
    other.prefill([[1, 2, 3]])
    other.idle()
    assert torch.equal(runner.decode([4]), other.decode([4]))


@torch.no_grad()
@settings(deadline=None, max_examples=25)
@given(shape=shapes, size=st.integers(1, 40), chunk=st.integers(1, 9), beside=st.integers(0, 2))
def test_a_prompt_in_parts_is_what_it_is_as_a_whole(
    shape: dict[str, Any], size: int, chunk: int, beside: int
) -> None:
    model = stirred(CONFIG.changed(**shape))
    runners: list[TextRunner] = [CachedRunner(model, CPU, chunk), WholeRunner(model, CPU)]
    draw = torch.Generator().manual_seed(size)
    prompts = [[1, 2, 3]] * beside + [torch.randint(50, (size,), generator=draw).tolist()]

    def read(head: Head, x: torch.Tensor) -> torch.Tensor:
        return head.logits(x)

    for prompt in prompts:  # each alone, so that a long one comes in parts
        found = [runner.prefill([prompt], [read]) for runner in runners]
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert found[0][1][0].shape == (len(prompt), 50)
    for _ in range(5):
        tokens = torch.randint(50, (len(prompts),), generator=draw).tolist()
        logits = [runner.decode(tokens) for runner in runners]
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_no_part_of_a_long_prompt_is_larger_than_a_chunk() -> None:
    model, sizes = stirred(CONFIG.changed(attention={"sliding_window": (8, -1)})), list[int]()
    hook = model.embeddings.register_forward_hook(lambda m, given, x: sizes.append(x.shape[1]))
    CachedRunner(model, CPU, 16).prefill([[1] * 70])
    assert sizes == [16, 16, 16, 16, 6]
    sizes.clear()
    CachedRunner(model, CPU, None).prefill([[1] * 70])  # ranks that call it as often as each other
    assert sizes == [70]
    hook.remove()
