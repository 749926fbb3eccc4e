"""Row 66: another optimiser, or state that nobody asks for, never goes on in silence."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import build_trainer, metrics, stop

from olm_data.errors import ValidationError

OPTIM = "--train_module.optim={{name: {}, lr: 1e-3}}"


@pytest.fixture(scope="module")
def run(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    build_trainer(tiny_mixture, folder, stop(2), OPTIM.format("adamw")).fit()
    return folder


@pytest.mark.parametrize(
    "name", ["adam", "dion", "lion", "muon", "skip_step_adamw", "skip_step_lion"]
)
def test_t2_another_optimiser_is_refused_with_the_two_ways_to_mean_it(
    name: str, run: Path, tiny_mixture: Path
) -> None:
    before = sorted(path.name for path in run.glob("step*"))
    trainer = build_trainer(tiny_mixture, run, stop(4), OPTIM.format(name))
    with pytest.raises(
        ValidationError, match=r"trained with the optimiser torch\.optim\.AdamW; "
    ) as e:
        trainer.fit()
    assert e.value.exit_code == 3
    assert "train_module.optim in its config.json" in str(e.value)
    assert "trainer.load_path" in str(e.value)
    assert [line["step"] for line in metrics(run) if "eval" not in line] == [1, 2]
    assert sorted(path.name for path in run.glob("step*")) == before


def test_t2_the_same_optimiser_without_its_skipped_steps_is_another_one(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    build_trainer(tiny_mixture, tmp_path, stop(2), OPTIM.format("skip_step_lion")).fit()
    trainer = build_trainer(tiny_mixture, tmp_path, stop(4), OPTIM.format("lion"))
    with pytest.raises(ValidationError, match="Lion with skipped steps; this configuration has"):
        trainer.fit()


def test_t2_weights_and_data_position_go_on_under_another_optimiser_where_asked(
    run: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer = build_trainer(
        tiny_mixture,
        tmp_path,
        stop(4),
        OPTIM.format("lion"),
        f"--trainer.load_path={run}",
        "--trainer.load_optim_state=false",
    )
    trainer.fit()
    assert [line["step"] for line in metrics(tmp_path) if "eval" not in line] == [3, 4]


def test_t2_a_load_path_with_its_optimiser_is_refused_as_well(
    run: Path, tiny_mixture: Path, tmp_path: Path
) -> None:
    trainer = build_trainer(
        tiny_mixture, tmp_path, OPTIM.format("lion"), f"--trainer.load_path={run}"
    )
    with pytest.raises(ValidationError, match="another"):
        trainer.fit()
