"""A train module, a model or a configuration of one's own reads its own checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import metrics
from torch import Tensor, nn
from torch.utils.data import DataLoader as TorchLoader

from olm_data.errors import UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_train import (
    BasicTrainModule,
    DataLoader,
    Decoder,
    DecoderConfig,
    Duration,
    TorchDataLoader,
    Trainer,
    TrainModule,
    TransformerTrainModuleConfig,
    World,
)
from olm_train.checkpoint.load import newest_checkpoint
from olm_train.train_module import TransformerTrainModule
from olm_train.train_module_base import require_parts

SMALL: dict[str, Any] = {
    "d_model": 16, "n_layers": 1, "n_heads": 2, "feed_forward": {"hidden_size": 16}
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BigramConfig:
    vocab_size: int
    width: int = 8
    dtype: torch.dtype = torch.float32


class Bigram(nn.Module):
    def __init__(self, config: BigramConfig | None, vocab_size: int, width: int) -> None:
        super().__init__()
        if config is not None:
            self.config = config
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))  # type: ignore[no-any-return]


class Own(TrainModule):
    """The least there is, with an optimiser whose state_dict numbers its parameters."""

    def __init__(self, lock: Lock, *, width: int = 8, described: bool = True, lr: float = 1e-2):
        config = BigramConfig(vocab_size=lock.tokenizer.vocab_size, width=width)
        self.world = World()
        self.model = Bigram(config if described else None, config.vocab_size, width)
        self.config = {"lr": lr}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def train_step(self, batches: Any, step: int, max_steps: int, **_: Any) -> dict[str, Any]:
        self.optimizer.zero_grad()
        loss = torch.zeros(())
        for batch in batches:
            total, count = self._loss(batch)
            (total / count / len(batches)).backward()
            loss += total.detach() / count / len(batches)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"train/CE loss": loss, "optim/total grad norm": norm, "optim/lr": 1e-2}

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        logits = self.model(batch.input_ids).flatten(0, 1)
        total = nn.functional.cross_entropy(logits, batch.labels.flatten(), reduction="sum")
        return total, (batch.labels != -100).sum()

    @torch.no_grad()
    def eval_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        return self._loss(batch)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        if "optim" in state:
            self.optimizer.load_state_dict(state["optim"])


def trainer(module: TrainModule, lock: Lock, folder: Path, stop: int) -> Trainer:
    return Trainer(
        train_module=module,
        data_loader=DataLoader(lock, global_batch_size=256, rank_microbatch_size=64),
        save_folder=folder,
        hard_stop=Duration.steps(stop),
    )


@pytest.mark.parametrize("described", [True, False])
def test_an_own_module_resumes_bit_for_bit(
    described: bool, tiny_mixture: Path, tmp_path: Path
) -> None:
    lock = Lock.read(tiny_mixture)
    trainer(Own(lock, described=described), lock, tmp_path / "whole", 5).fit()
    for stop in (3, 5):
        module = Own(lock, described=described)
        trainer(module, lock, tmp_path / "stopped", stop).fit()
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    tensors = []
    for name in ("whole", "stopped"):
        checkpoint = newest_checkpoint(tmp_path / name, World(), lambda _: None)
        state = module.state_dict()
        checkpoint.load_tensors(state, World())
        tensors.append([value.clone() for value in state["model"].values()])
    assert all(torch.equal(one, other) for one, other in zip(*tensors, strict=True))


def test_another_shape_of_an_own_model_is_refused_and_its_options_are_said(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = Lock.read(tiny_mixture)
    trainer(Own(lock), lock, tmp_path, 2).fit()
    with pytest.raises(ValidationError, match=r"model\.width: 8 -> 16"):
        trainer(Own(lock, width=16), lock, tmp_path, 4).fit()
    trainer(Own(lock, lr=1e-3), lock, tmp_path, 4).fit()
    assert "  changed: train_module.lr: 0.01 -> 0.001\n" in capsys.readouterr().err


@dataclass(frozen=True, kw_only=True)
class MoreFields(DecoderConfig):
    note: str = "mine"


@dataclass(frozen=True, kw_only=True)
class MoreOptions(TransformerTrainModuleConfig):
    temperature: float = 1.0


def test_subclasses_of_configurations_with_one_more_field_resume(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    lock = Lock.read(tiny_mixture)
    shape = MoreFields(vocab_size=lock.tokenizer.vocab_size, **SMALL)
    options = MoreOptions(rank_microbatch_size=64)
    for name, stops in (("whole", (4,)), ("stopped", (2, 4))):
        for stop in stops:
            module = TransformerTrainModule(options, shape, seed=1)
            trainer(module, lock, tmp_path / name, stop).fit()
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    other = TransformerTrainModule(options, replace(shape, note="other"), seed=1)
    with pytest.raises(ValidationError, match=r"model\.note: 'mine' -> 'other'"):
        trainer(other, lock, tmp_path / "stopped", 5).fit()


@dataclass(frozen=True, kw_only=True)
class BiasedConfig(DecoderConfig):
    strength: float = 1.0


class Biased(Decoder):
    """A decoder with a parameter and a configuration field of its own."""

    config: BiasedConfig

    def __init__(self, config: BiasedConfig, **factory: Any) -> None:
        super().__init__(config, **factory)
        self.bias = nn.Parameter(torch.empty(config.d_model, **factory))

    def _embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x = super()._embed(input_ids, positions)
        return x + (self.config.strength * self.bias).to(x.dtype)


BiasedConfig.decoder_class = Biased


def test_a_decoder_with_parameters_and_fields_of_its_own_resumes(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    lock = Lock.read(tiny_mixture)
    shape = BiasedConfig(vocab_size=lock.tokenizer.vocab_size, **SMALL)

    def module(shape: DecoderConfig) -> TransformerTrainModule:
        options = TransformerTrainModuleConfig(rank_microbatch_size=64)
        return TransformerTrainModule(options, shape, seed=1)

    for name, stops in (("whole", (4,)), ("stopped", (2, 4))):
        for stop in stops:
            trained = module(shape)
            trainer(trained, lock, tmp_path / name, stop).fit()
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    plain = module(DecoderConfig(vocab_size=shape.vocab_size, **SMALL))
    trainer(plain, lock, tmp_path / "plain", 4).fit()
    assert metrics(tmp_path / "plain") != metrics(tmp_path / "whole")
    checkpoint = newest_checkpoint(tmp_path / "stopped", World(), lambda _: None)
    assert "model.bias" in checkpoint.index.tensors
    with pytest.raises(ValidationError, match=r"model\.strength: 1\.0 -> 2\.0"):
        trainer(module(replace(shape, strength=2.0)), lock, tmp_path / "stopped", 5).fit()


def test_parts_of_plain_torch_are_answered_by_what_to_wrap_them_in() -> None:
    model, loader = nn.Linear(2, 1), TorchLoader([1, 2])
    ours = BasicTrainModule(model, torch.optim.SGD, nn.MSELoss(), optim={"lr": 0.1})
    wrapped = TorchDataLoader(loader)
    for parts, says in (
        ((model, wrapped, None), "give train_module=BasicTrainModule"),
        ((ours, loader, None), "give data_loader=TorchDataLoader"),
        ((ours, wrapped, 2), "give Duration.steps"),
    ):
        with pytest.raises(UsageError) as refused:
            require_parts(*parts)
        assert says in str(refused.value)
    require_parts(ours, wrapped, Duration.steps(2), None)
