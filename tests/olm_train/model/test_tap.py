from __future__ import annotations

import torch
from support.training import MODEL
from torch import nn

from olm_train.model.decoder import Decoder
from olm_train.model.tap import NO_TAP, ROW, Watcher, names_within, row_of


def test_a_row_counts_means_and_variances_within_rows_of_the_batch() -> None:
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1))
    each = x.flatten(1)
    wanted = torch.stack([torch.tensor(3.0), each.mean(1).sum(), each.var(1).sum(), x.abs().max()])
    torch.testing.assert_close(row_of(x), wanted)


def test_a_watcher_passes_all_on_and_keeps_rows_and_gradients_of_its_names() -> None:
    slots = torch.zeros(2, ROW, requires_grad=True)
    watcher = Watcher(("", "inner.w"), slots)
    x = torch.randn(2, 3, requires_grad=True)
    y = watcher.within("inner")("w", x * 2)
    assert watcher("other", y) is y
    z = watcher("", y * 3)
    assert torch.equal(z, x * 6)
    z.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 6))
    assert torch.equal(slots.grad[:, 3], torch.tensor([1.0, 3.0]))
    assert torch.equal(torch.stack(watcher.rows)[1], row_of(x.detach() * 2))


def test_no_tap_does_nothing() -> None:
    x = torch.ones(1)
    assert NO_TAP.within("a")("b", x) is x


def test_names_are_those_of_modules_that_compute_something() -> None:
    block = Decoder(MODEL, device="meta").blocks[0]
    names = names_within(block)
    assert names[0] == ""
    assert "attention.w_qkv" in names
    gone = {n for n, each in block.named_modules() if isinstance(each, nn.Identity)}
    assert gone
    assert not gone & set(names)
