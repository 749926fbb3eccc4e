"""Initial weights depend on seed and name only. Sharded ones: test_shards.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.runs import build_trainer

from olm_data.errors import UsageError
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.init import RULE, Workspace, init_parameters, parameter_key

CONFIG = DecoderConfig(
    vocab_size=600, d_model=64, n_layers=3, n_heads=4, attention={"qk_norm": "head"}
)


def weights(
    config: DecoderConfig, seed: int = 7, threads: int | None = None
) -> dict[str, torch.Tensor]:
    model = Decoder(config)
    init_parameters(model, seed, threads=threads)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_same_seed_same_bits_other_seed_other_bits() -> None:
    first, again, other = weights(CONFIG), weights(CONFIG), weights(CONFIG, seed=8)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, other[name]) == (value.ndim == 1)


def test_an_option_leaves_the_weights_it_does_not_touch() -> None:
    tied = weights(CONFIG.changed(head={"tied": True}, attention={"qk_norm": None}))
    full = weights(CONFIG)
    assert set(full) - set(tied) == {
        "lm_head.weight",
        *(f"blocks.{i}.attention.{which}_norm.weight" for i in range(3) for which in "qk"),
    }
    for name, value in tied.items():
        assert torch.equal(value, full[name])


def test_biases_and_rows_that_pad_the_vocabulary_are_zeros() -> None:
    plain = weights(CONFIG)
    for name, value in weights(
        CONFIG.changed(attention={"bias": "all"}, feed_forward={"bias": True}, vocab_multiple=128)
    ).items():
        if name.endswith(".bias"):
            assert not value.any()
        elif name in ("embeddings.weight", "lm_head.weight"):
            assert torch.equal(value[:600], plain[name])
            assert value.shape == (640, 64)
            assert not value[600:].any()
        else:
            assert torch.equal(value, plain[name])


def test_norm_weights_are_ones_or_zeros_that_are_added_to_one() -> None:
    for zero_centred in (False, True):
        for name, value in weights(CONFIG.changed(norm={"zero_centred": zero_centred})).items():
            assert value.ndim == 2 or (value == 1 - zero_centred).all(), name


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


def test_t3_golden_weights() -> None:
    """Frozen bit for bit: other values need another name of the rule."""
    assert RULE == "sliced-1"
    assert parameter_key(7, "blocks.1.attention.w_qkv.weight") == 0x56281A034859FA9D
    drawn = weights(CONFIG)
    first = drawn["blocks.1.attention.w_qkv.weight"][100, :2]
    assert [x.hex() for x in first.tolist()] == ["-0x1.1d17c00000000p-7", "0x1.ca08b60000000p-8"]
    last = drawn["blocks.2.feed_forward.w_down.weight"][63, -2:]
    assert [x.hex() for x in last.tolist()] == ["-0x1.bb135c0000000p-8", "-0x1.cd43a80000000p-9"]


@pytest.mark.parametrize("threads", [2, 5])
def test_t3_threads_and_pieces_leave_every_bit(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights(CONFIG)
    monkeypatch.setattr("olm_train.model.init.PIECE", 997)
    found = weights(CONFIG, threads=threads)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_t3_an_error_in_a_thread_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Workspace, "fill", lambda *_: (_ for _ in ()).throw(MemoryError("drawn")))
    with pytest.raises(MemoryError, match="drawn"):
        weights(CONFIG, threads=3)


def test_t3_weights_of_another_dtype_are_the_fp32_ones_rounded() -> None:
    """As on another device, the values are drawn in fp32 on the CPU and then copied."""
    model = Decoder(CONFIG, dtype=torch.bfloat16)
    init_parameters(model, 7)
    for name, value in weights(CONFIG).items():
        assert torch.equal(dict(model.named_parameters())[name], value.bfloat16())


def test_t3_parameters_do_not_resemble_each_other() -> None:
    drawn = {n: v.flatten()[:4096] for n, v in weights(CONFIG).items() if v.ndim == 2}
    table = torch.corrcoef(torch.stack(list(drawn.values()))) - torch.eye(len(drawn))
    assert table.abs().max() < 5 / 64


def test_t3_the_rule_is_named_in_the_configuration_and_another_one_is_refused(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path)
    assert trainer.config["initial_values"] == RULE
    with pytest.raises(UsageError, match="initial_values is one of sliced-1, not 'torch-1'"):
        build_trainer(tiny_mixture, tmp_path, "--initial_values=torch-1")
