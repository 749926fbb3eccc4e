"""sdpa with a mask and grouped heads: keys and values are repeated, with the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from olm_train.model.attention import ATTENTION_BACKENDS, block_causal_mask


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [True, False])
def test_t9_no_call_has_a_mask_and_grouped_heads(
    kv_heads: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 12, heads, 8) for heads in (4, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    mask = block_causal_mask(torch.tensor([[0] * 5 + [5] * 7] * 2)) if masked else None
    plain, calls = F.scaled_dot_product_attention, []

    def recorded(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        heads = [tensor.shape[1] for tensor in tensors]
        calls.append((len(set(heads)) > 1 or options["enable_gqa"], options["attn_mask"]))
        return plain(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    out = ATTENTION_BACKENDS["sdpa"].attend(q, k, v, mask)
    ((grouped, given),) = calls
    assert grouped == (kv_heads < 4 and not masked)
    assert given is mask
    expected = plain(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        attn_mask=mask, is_causal=mask is None, enable_gqa=True,
    ).transpose(1, 2)  # fmt: skip
    torch.testing.assert_close(out, expected)
    weights = torch.randn(out.shape, generator=generator)
    found = torch.autograd.grad((out * weights).sum(), (q, k, v))
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
