"""Initial weights depend on seed and name only. Sharded ones: parallel/test_parallel.py."""

from __future__ import annotations

from dataclasses import replace

import torch

from olm_train.model.decoder import DecoderConfig
from olm_train.model.init import init_parameters, parameter_seed, truncated_normal

CONFIG = DecoderConfig(vocab_size=600, d_model=64, n_layers=3, n_heads=4, qk_norm="head")


def weights(config: DecoderConfig, seed: int = 7) -> dict[str, torch.Tensor]:
    model = config.build()
    init_parameters(model, seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_same_seed_same_bits_other_seed_other_bits() -> None:
    first, again, other = weights(CONFIG), weights(CONFIG), weights(CONFIG, seed=8)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, other[name]) == (value.ndim == 1)


def test_an_option_leaves_the_weights_it_does_not_touch() -> None:
    tied = weights(replace(CONFIG, tie_embeddings=True, qk_norm=None))
    full = weights(CONFIG)
    assert set(full) - set(tied) == {
        "lm_head.weight",
        *(f"blocks.{i}.attention.{which}_norm.weight" for i in range(3) for which in "qk"),
    }
    for name, value in tied.items():
        assert torch.equal(value, full[name])


def test_biases_and_rows_that_pad_the_vocabulary_are_zeros() -> None:
    plain = weights(CONFIG)
    for name, value in weights(replace(CONFIG, bias="all", vocab_multiple=128)).items():
        if name.endswith(".bias"):
            assert not value.any()
        elif name in ("embeddings.weight", "lm_head.weight"):
            assert torch.equal(value[:600], plain[name])
            assert value.shape == (640, 64)
            assert not value[600:].any()
        else:
            assert torch.equal(value, plain[name])


def test_global_random_state_has_no_part_in_it() -> None:
    torch.manual_seed(1)
    first = weights(CONFIG)
    before = torch.get_rng_state()
    second = weights(CONFIG)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_deviations_are_as_documented() -> None:
    for name, value in weights(CONFIG).items():
        if value.ndim == 1:
            assert (value == 1).all()
            continue
        residual = name.endswith(("w_out.weight", "w_down.weight"))
        std = 0.02 / (6**0.5 if residual else 1)
        assert abs(value.std().item() / (0.9866 * std) - 1) < 0.05  # truncation at 3 costs 1.3 %
        assert value.abs().max() <= 3 * std
        assert abs(value.mean().item()) < 0.1 * std


def test_golden_weights() -> None:
    """Frozen: a change here is a change of the starting point of every run."""
    assert parameter_seed(7, "blocks.1.attention.w_qkv.weight") == 8386094638131648850
    drawn = weights(CONFIG)
    torch.testing.assert_close(
        drawn["blocks.1.attention.w_qkv.weight"][100, :4],
        torch.tensor([0.01348193, 0.02436678, -0.02115021, 0.01006332]),
        rtol=1e-5,
        atol=0,
    )
    torch.testing.assert_close(
        drawn["blocks.2.feed_forward.w_down.weight"][63, -4:],
        torch.tensor([0.001662833, -0.008775921, 0.003712808, 0.001186720]),
        rtol=1e-5,
        atol=0,
    )


def test_golden_draws_beyond_the_cutoff() -> None:
    drawn = torch.empty(100_000).normal_(generator=torch.Generator().manual_seed(7))
    kept = truncated_normal(drawn.shape, 1.0, torch.Generator().manual_seed(7))
    outside = drawn.abs() > 3
    assert outside.sum() == 273
    assert torch.equal(kept[~outside], drawn[~outside])
    expected = torch.tensor([1.31690001, -0.71448129, -0.50962973])
    torch.testing.assert_close(kept[outside][:3], expected, rtol=1e-5, atol=0)
