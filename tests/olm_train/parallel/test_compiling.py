"""Compiled blocks are called uncompiled where each call is of another kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.model_options import CONFIG, stirred

from olm_train.model.compiled import CompiledByKind
from olm_train.parallel.activation_checkpointing import ActivationCheckpointingConfig
from olm_train.parallel.compiling import CompileConfig, uncompiled


def test_uncompiled_compiles_nothing_and_leaves_all_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    monkeypatch.setattr(CompiledByKind, "__call__", lambda self, *a, **k: calls.append(a) or a[0])
    model = stirred(replace(CONFIG, n_layers=2))
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = model(ids)
        CompileConfig().apply(model.blocks, ActivationCheckpointingConfig())
        compiled = [vars(block)["forward"] for block in model.blocks]
        with uncompiled(model.blocks):
            assert torch.equal(model(ids), expected)
        with pytest.raises(ZeroDivisionError), uncompiled(model.blocks):
            raise ZeroDivisionError
        assert not calls
        assert [vars(block)["forward"] for block in model.blocks] == compiled
        model(ids)
        assert len(calls) == 2


def test_blocks_that_are_not_compiled_are_called_as_they_are() -> None:
    model = stirred(CONFIG)
    with torch.no_grad(), uncompiled(model.blocks):
        model(torch.tensor([[1, 2, 3]]))
    assert "forward" not in vars(model.blocks[0])
