"""Any model, loss, optimiser and data train, stop and go on bit for bit; alone and on two ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import run_ranks
from support.own_data import CLASSES, Images, Own, StatefulStream
from support.runs import metrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.run_log.run_folder import Run
from olm_train import (
    BasicTrainModule,
    Callback,
    CheckpointerConfig,
    CosineWithWarmup,
    Duration,
    TorchDataLoader,
    Trainer,
    World,
)
from olm_train.checkpoint.load import newest_checkpoint
from olm_train.checkpoint.policy import LoadPolicy
from olm_train.data.base import DataLoaderBase
from olm_train.parallel.config import DataParallelConfig, DataParallelType
from olm_train.stability.gate import NonFinite

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
}


class Classifier(nn.Module):
    """Convolution, running statistics, dropout: what a decoder has none of."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(16, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))  # type: ignore[no-any-return]


def module_of(name: str = "SGD", *, world: World | None = None, **options: Any) -> BasicTrainModule:
    torch.manual_seed(1)
    kind, optim = OPTIMIZERS[name]
    options = {"max_grad_norm": 1.0, "scheduler": CosineWithWarmup(warmup=2), **options}
    return BasicTrainModule(
        Classifier(), kind, nn.CrossEntropyLoss(), optim=optim, world=world, **options
    )


def loader_of(world: World | None = None, **options: Any) -> TorchDataLoader:
    world, data = world or World(), Images()
    sampler: Any = DistributedSampler(data, world.size, world.rank, drop_last=True)
    plain: DataLoader[Any] = DataLoader(data, 2, sampler=sampler)
    return TorchDataLoader(plain, world=world, accumulate=2, **options)


def trainer_of(
    module: BasicTrainModule, loader: DataLoaderBase, folder: Path, stop: int, **options: Any
) -> Trainer:
    return Trainer(
        train_module=module,
        data_loader=loader,
        save_folder=folder,
        **{"max_duration": Duration.steps(8), "hard_stop": Duration.steps(stop), **options},
    )


def saved(module: BasicTrainModule, folder: Path) -> dict[str, Tensor]:
    """What the newest checkpoint of a run holds."""
    checkpoint = newest_checkpoint(folder, module.world, lambda _: None)
    assert checkpoint is not None
    assert checkpoint.manifest.lock_digest == ""
    return {name: _read(checkpoint, name) for name in checkpoint.index.tensors}


def _read(checkpoint: Any, name: str) -> Tensor:
    entry = checkpoint.index.tensors[name]
    whole = {name: torch.empty(entry.shape, dtype=entry.torch_dtype)}
    from olm_train.checkpoint.tensors import fill

    fill(whole, checkpoint.tensors, checkpoint.index)
    return whole[name]


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_image_classifier_goes_on_bit_for_bit_with_any_optimiser(
    name: str, tmp_path: Path
) -> None:
    for folder, stops in (("whole", (8,)), ("stopped", (3, 5, 8))):
        for stop in stops:
            module = module_of(name)
            trainer_of(module, loader_of(), tmp_path / folder, stop).fit()
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "whole")
    whole = saved(module, tmp_path / "whole")
    assert same(whole, saved(module, tmp_path / "stopped"))
    assert any("running_mean" in key for key in whole)
    assert any(key.startswith("optim.") for key in whole), "state from the first step is restored"


WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "by class": {
        "dp_config": DataParallelConfig(name=DataParallelType.fsdp),
        "wrap_classes": (nn.Conv2d, nn.Linear),
    },
    "by size": {"dp_config": DataParallelConfig(name=DataParallelType.fsdp), "min_num_params": 40},
}


def _on_two_ranks(folder: str) -> dict[str, Any]:
    world = World(rank=torch.distributed.get_rank(), size=2, neighbours=range(2))
    results: dict[str, Any] = {}
    for way, options in WAYS.items():
        for name in ("SGD", "Adafactor" if way == "ddp" else "AdamW", "NAdam"):
            for run, stops in (("whole", (5,)), ("stopped", (2, 5))):
                place = Path(folder) / way / name / run
                for stop in stops:
                    module = module_of(name, world=world, **options)
                    trainer_of(module, loader_of(world), place, stop).fit()
            kinds = [type(m).__name__ for m in module.model.modules() if hasattr(m, "unshard")]
            results[way] = kinds
    try:
        module = module_of("Adafactor", world=world, **WAYS["by class"])
        trainer_of(module, loader_of(world), Path(folder) / "refused", 5).fit()
    except UsageError as error:
        results["refused"] = str(error)
    own = Path(folder) / "own"
    for run, stops in (("whole", (6,)), ("stopped", (2, 6))):
        for stop in stops:
            data = Own(None, rank=world.rank, size=2)
            trainer_of(module_of(world=world), data, own / run, stop).fit()
    return results


@pytest.mark.slow
def test_two_ranks_go_on_bit_for_bit_under_ddp_and_fsdp(tmp_path: Path) -> None:
    results = run_ranks(_on_two_ranks, 2, str(tmp_path))
    assert results[0] == results[1]
    assert results[0]["ddp"] == []
    assert "Adafactor cannot take a step on sharded weights" in results[0]["refused"]
    assert results[0]["by class"] == ["FSDPClassifier", "FSDPConv2d", "FSDPLinear"]
    assert results[0]["by size"] == ["FSDPClassifier", "FSDPConv2d", "FSDPLinear"]
    for run in [*sorted(tmp_path.glob("*/*/whole")), tmp_path / "own" / "whole"]:
        stopped = run.parent / "stopped"
        assert metrics(stopped) == metrics(run), run
        assert same(saved(module_of(), stopped), saved(module_of(), run)), run
    losses = {
        way: [line["train/CE loss"] for line in metrics(tmp_path / way / "SGD" / "whole")]
        for way in WAYS
    }
    for way in ("by class", "by size"):
        assert losses[way] == pytest.approx(losses["ddp"], rel=1e-5)


def test_the_loss_does_not_depend_on_how_a_batch_is_cut(tmp_path: Path) -> None:
    whole = [(torch.randn(5, 3), torch.randn(5, 2))]
    cut = [(whole[0][0][:4], whole[0][1][:4]), (whole[0][0][4:], whole[0][1][4:])]
    results = []
    for batches in (whole, cut):
        torch.manual_seed(3)
        model = nn.Linear(3, 2)
        module = BasicTrainModule(model, torch.optim.SGD, nn.MSELoss(), optim={"lr": 0.1})
        results.append(module.train_step(batches, 1, 1))
        results[-1]["weight"] = model.weight.detach()
    for name in ("train/CE loss", "optim/total grad norm", "weight"):
        torch.testing.assert_close(results[0][name], results[1][name])
    assert results[0]["train/instances"] == 5


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.weight * (x if y is None else x + y)


def test_batches_may_be_tensors_tuples_and_mappings() -> None:
    x, y = torch.ones(3, 2), torch.full((3, 2), 2.0)
    losses = []
    for batch in ((x, y, x), {"x": x, "y": y, "labels": x}, [x, x], x, {"x": x, "labels": x}):
        module = BasicTrainModule(Sum(), torch.optim.SGD, nn.L1Loss(reduction="none"))
        losses.append(float(module.train_step([batch], 1, 1)["train/CE loss"]))
        total, count = module.eval_batch(batch)
        assert (total.dtype, int(count)) == (torch.float64, 3)
    assert losses == [2.0, 2.0, 0.0, 0.0, 0.0]


def test_a_step_that_is_not_finite_changes_nothing_not_even_buffers() -> None:
    module = module_of(non_finite=NonFinite.skip, scheduler=None)
    images = torch.randn(4, 1, 4, 4)
    before = {name: tensor.clone() for name, tensor in module.model.state_dict().items()}
    out = module.train_step([(images * float("nan"), torch.zeros(4, dtype=torch.int64))], 1, 2)
    assert out["optim/non-finite"] == 1
    assert same(before, module.model.state_dict())
    assert (
        module.train_step([(images, torch.zeros(4, dtype=torch.int64))], 2, 2)["optim/lr"] == 0.05
    )
    assert not same(before, module.model.state_dict())


def test_decay_is_for_matrices_and_an_instance_keeps_its_groups() -> None:
    module = BasicTrainModule(
        Classifier(), torch.optim.AdamW, nn.CrossEntropyLoss(), optim={"weight_decay": 0.3}
    )
    decays = {
        g["weight_decay"]: {p.ndim for p in g["params"]} for g in module.optimizer.param_groups
    }
    assert decays == {0.3: {2, 4}, 0.0: {1}}
    model = Classifier()
    own = torch.optim.AdamW(
        [{"params": model.head.parameters(), "lr": 0.5}, {"params": model.features.parameters()}]
    )
    module = BasicTrainModule(model, own, nn.CrossEntropyLoss())
    assert module.optimizer is own
    assert [group["peak_lr"] for group in own.param_groups] == [0.5, 1e-3]


def test_what_cannot_be_an_optimiser_here_is_refused() -> None:
    def build(optimizer: Any, **options: Any) -> None:
        BasicTrainModule(Classifier(), optimizer, nn.CrossEntropyLoss(), **options)

    with pytest.raises(UsageError, match="needs no closure"):
        build(torch.optim.LBFGS)
    with pytest.raises(UsageError, match="none of the model's"):
        build(torch.optim.SGD(Classifier().parameters()))
    model = Classifier()
    with pytest.raises(UsageError, match="given as a class"):
        BasicTrainModule(model, torch.optim.SGD(model.parameters()), nn.L1Loss(), optim={"lr": 1})


def test_another_optimiser_at_a_resume_is_refused_with_the_two_ways_to_mean_it(
    tmp_path: Path,
) -> None:
    trainer_of(module_of("AdamW"), loader_of(), tmp_path / "first", 2).fit()
    with pytest.raises(ValidationError, match=r"torch\.optim\.AdamW.*torch\.optim\.NAdam") as error:
        trainer_of(module_of("NAdam"), loader_of(), tmp_path / "first", 4).fit()
    fix = error.value.fix or ""
    assert "go on with the optimiser of the checkpoint" in fix
    assert "trainer.load_optim_state: false" in fix
    policy = LoadPolicy(path=str(tmp_path / "first"), optim_state=False)
    trainer = trainer_of(module_of("NAdam"), loader_of(), tmp_path / "second", 4, load=policy)
    trainer.fit()
    assert [line["step"] for line in metrics(tmp_path / "second")] == [3, 4]


# ---- runs without a lock ---------------------------------------------------------------------


class Epochs(Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def pre_epoch(self, epoch: int) -> None:
        self.seen.append(f"{self.trainer.step + 1}: {epoch} begins")

    def post_epoch(self, epoch: int) -> None:
        self.seen.append(f"{epoch} ended")


def test_epochs_are_counted_and_logged(tmp_path: Path) -> None:
    epochs = Epochs()
    loader = loader_of()
    assert loader.steps == 5
    trainer = trainer_of(
        module_of(),
        loader,
        tmp_path,
        99,
        max_duration=Duration.epochs(2),
        callbacks={"epochs": epochs},
    )
    assert trainer.stop_step == 10
    trainer.fit()
    assert epochs.seen == ["1: 1 begins", "1 ended", "6: 2 begins", "2 ended"]
    lines = metrics(tmp_path)
    assert [line.get("epoch", 1) for line in lines] == [1] * 5 + [2] * 5
    assert {line["version"] for line in lines} == {2}
    assert not {"rows", "order", "tokens"} & lines[0].keys()
    with pytest.raises(InputError, match="no mixture lock"):
        Run.read(str(tmp_path))


def test_data_of_unknown_length_end_the_run_and_their_length_is_not_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def trainer(**options: Any) -> Trainer:
        plain: DataLoader[Any] = DataLoader(StatefulStream(), 4)
        data = TorchDataLoader(plain, accumulate=2, epochs=2)
        return trainer_of(module_of(), data, tmp_path, **{"stop": 8, **options})

    with pytest.raises(UsageError, match=r"Duration\.steps\(n\)"):
        trainer(max_duration=Duration.epochs(1))
    with pytest.raises(UsageError, match="counts instances, not tokens"):
        trainer(max_duration=Duration.tokens(100))
    trainer(stop=4).fit()
    trainer(stop=8).fit()
    assert "the data ended after step 6" in capsys.readouterr().err
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    trainer(stop=8).fit()  # again: nothing more comes
    assert len(metrics(tmp_path)) == 6


def test_a_loader_of_its_own_that_ends_too_early_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="ended after 2 steps"):
        trainer_of(module_of(), Own(3, ends=2), tmp_path / "a", 8).fit()
    empty = Own(None, ends=1)
    empty.step = 1
    with pytest.raises(InputError, match="gave nothing to train on"):
        trainer_of(module_of(), empty, tmp_path / "b", 8).fit()


def test_a_bad_step_without_a_lock_says_so_and_is_not_rewound(tmp_path: Path) -> None:
    class Bad(Own):
        def __iter__(self) -> Any:
            for step in super().__iter__():
                yield [(x * float("nan"), y) for x, y in step] if self.step == 2 else step

    for policy in (NonFinite.halt, NonFinite.rewind):
        with pytest.raises(Exception, match="the data come from no mixture lock"):
            trainer_of(
                module_of(non_finite=policy),
                Bad(),
                tmp_path / policy,
                8,
                checkpointer=CheckpointerConfig(save_interval=1),
            ).fit()
