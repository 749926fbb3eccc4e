"""Texts of a run: those that the weights of a step write, on any ranks; losses stay as they are."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.distributed import run_ranks
from support.runs import build_trainer, group_world

from olm_data.errors import OlmError, UsageError
from olm_data.run_log.run_folder import SAMPLES, StepSamples, read_samples
from olm_train.callbacks.base import Callback
from olm_train.distributed.preempt import Preempted
from olm_train.extensions.generate.command import generate
from olm_train.extensions.generate.samples import SamplesCallback
from olm_train.extensions.generate.sampling import Sampling

pytestmark = pytest.mark.xdist_group("samples")  # its fixtures are made once
PROMPTS = ["the quick", "def f", "", "seven owls sleep", "a"]
END = ["--trainer.hard_stop={value: 3, unit: steps}"]
SPARSE = ["--trainer.callbacks.lm_evaluator.eval_interval=100"]


def texts(samples: StepSamples) -> list[str]:
    return [each.text for each in samples.texts]


def untimed(folder: Path) -> list[Any]:
    found = [json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()]
    return [{**each, "time": 0} for each in found]


@pytest.fixture(scope="module")
def sampled(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples") / "sampled"
    callback = SamplesCallback(
        prompts=PROMPTS, max_new_tokens=9, eval_interval=6, fixed_steps=[7], eval_on_startup=True,
        temperature=1.3, top_k=40, seed=5,
    )  # fmt: skip
    build_trainer(tiny_mixture, folder, *SPARSE, callbacks={"samples": callback}).fit()
    return folder


def test_texts_are_those_of_the_weights_of_each_step(sampled: Path) -> None:
    samples = read_samples(sampled)
    assert [each.step for each in samples] == [0, 6, 7, 12, 18, 24]
    assert samples[0].texts != samples[-1].texts
    for each in samples[1:]:
        assert [text.prompt for text in each.texts] == PROMPTS
        if each.step == 7:
            continue
        wish = Sampling(temperature=1.3, top_k=40, seed=5)
        step = str(each.step)
        again = generate(str(sampled), PROMPTS, checkpoint=step, max_new_tokens=9, sampling=wish)
        assert texts(each) == [sample.text for sample in again]


def test_each_option_has_its_effect(tiny_mixture: Path, sampled: Path, tmp_path: Path) -> None:
    other = SamplesCallback(
        prompts=PROMPTS[:2], max_new_tokens=1, temperature=0.0, eval_on_finish=True
    )
    build_trainer(tiny_mixture, tmp_path / "a", *SPARSE, *END, callbacks={"samples": other}).fit()
    (last,) = read_samples(tmp_path / "a")
    assert (last.step, last.temperature, len(last.texts)) == (3, 0.0, 2)
    longest = [max(map(len, texts(each))) for each in (last, read_samples(sampled)[-1])]
    assert longest[0] < longest[1]
    none = SamplesCallback(prompts=PROMPTS, eval_on_finish=False)
    build_trainer(tiny_mixture, tmp_path / "b", *SPARSE, *END, callbacks={"samples": none}).fit()
    assert read_samples(tmp_path / "b") == []


def test_a_prompt_that_is_too_long_is_refused_before_the_first_step(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    callback = SamplesCallback(prompts=["the quick " * 60])
    with pytest.raises(UsageError, match="looks at 32"):
        build_trainer(tiny_mixture, tmp_path, *SPARSE, callbacks={"samples": callback}).fit()
    with pytest.raises(OlmError):
        SamplesCallback(prompts=[])


class Stop(Callback):
    """Sends a signal before the texts of a step are written."""

    priority = 5

    def __init__(self, step: int) -> None:
        self.step = step

    def evaluate(self) -> None:
        if self.trainer.step == self.step:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("step", [12, 24])
def test_a_run_that_is_stopped_writes_them_after_the_restart(
    tiny_mixture: Path, tmp_path: Path, sampled: Path, step: int
) -> None:
    def build(*more: Callback) -> Any:
        callback = SamplesCallback(
            prompts=PROMPTS, max_new_tokens=9, eval_interval=6, fixed_steps=[7],
            eval_on_startup=True, temperature=1.3, top_k=40, seed=5,
        )  # fmt: skip
        others = {f"other{n}": each for n, each in enumerate(more)}
        return build_trainer(
            tiny_mixture, tmp_path, *SPARSE, callbacks={"samples": callback, **others}
        )

    if step == 12:
        with pytest.raises(Preempted):
            build(Stop(step)).fit()
        assert [each.step for each in read_samples(tmp_path)] == [0, 6, 7]
    else:
        build(Stop(step)).fit()
    build().fit()
    assert untimed(tmp_path) == untimed(sampled)
    (tmp_path / SAMPLES).unlink()
    build().fit()  # it has ended: those of the last step are still to do
    assert untimed(tmp_path) == untimed(sampled)[-1:]


def sampled_on_ranks(lock: Path, folder: Path, *options: str) -> None:
    wish = {"prompts": PROMPTS, "max_new_tokens": 9, "eval_interval": 8, "temperature": 1.3}
    given = f"--trainer.callbacks.samples={json.dumps(wish)}"
    world = group_world() if dist.is_initialized() else None
    build_trainer(lock, folder, *SPARSE, given, *options, world=world).fit()


@pytest.mark.slow
def test_ranks_write_the_same_texts(tiny_mixture: Path, tmp_path: Path) -> None:
    sampled_on_ranks(tiny_mixture, tmp_path / "alone")
    expected = untimed(tmp_path / "alone")
    assert [each["step"] for each in expected] == [8, 16, 24]
    for name in ("fsdp", "ddp"):
        option = f"--train_module.dp_config.name={name}"
        run_ranks(sampled_on_ranks, 2, tiny_mixture, tmp_path / name, option)
        assert untimed(tmp_path / name) == expected, name
