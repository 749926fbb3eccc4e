"""The files of a run folder beside its log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from olm_data.errors import InputError, ValidationError
from olm_data.run_log.log import METRICS, MetricsWriter, Step
from olm_data.run_log.run_folder import (
    CONFIG,
    ENVIRONMENT,
    SAMPLE,
    SAMPLES,
    BadDocument,
    BadRow,
    BadStep,
    Run,
    Sample,
    StepSamples,
    WrittenText,
    bad_step_files,
    forget_samples,
    picked,
    read_environment,
    read_samples,
    write_environment,
    write_samples,
)

GOLDEN = b"""\
{
 "prompt": "a",
 "text": "\\u00e9",
 "ids": [
  1,
  2
 ],
 "checkpoint": "step00000005",
 "temperature": 0.5,
 "top_k": 50,
 "seed": 0,
 "top_p": 0.9,
 "min_p": 0.1,
 "repetition_penalty": 1.5,
 "stop": [
  "x"
 ],
 "finish": "length"
}
"""


OLD = GOLDEN[: GOLDEN.index(b',\n "top_p')] + b"\n}\n"


"""As written before there were more options."""


def test_a_sample_has_its_bytes_and_is_read_again(tmp_path: Path) -> None:
    assert Sample.read(tmp_path) is None
    (tmp_path / SAMPLE).write_bytes(GOLDEN)
    sample = Sample.read(tmp_path)
    assert (sample.text, sample.ids) == ("\u00e9", (1, 2))
    assert sample.encode() == GOLDEN
    assert sample.line() == json.dumps(json.loads(GOLDEN)).encode() + b"\n"
    (tmp_path / SAMPLE).write_bytes(OLD)
    before = Sample.read(tmp_path)
    assert (before.top_p, before.stop, before.finish, before.seed) == (1.0, (), None, 0)


def test_the_environment_is_versions_by_name(tmp_path: Path) -> None:
    assert read_environment(tmp_path) is None
    write_environment(tmp_path, {"python": "3.12", "package torch": "2.13"})
    written = b'{\n "python": "3.12",\n "package torch": "2.13"\n}\n'
    assert (tmp_path / ENVIRONMENT).read_bytes() == written
    assert read_environment(tmp_path) == {"python": "3.12", "package torch": "2.13"}


@pytest.mark.parametrize("text", ["{", "[]", '{"python": 3}', '{"prompt": "a"}'])
@pytest.mark.parametrize("name", [SAMPLE, ENVIRONMENT])
def test_a_malformed_file_names_itself(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).write_text(text)
    if (name, text) == (ENVIRONMENT, '{"prompt": "a"}'):
        assert read_environment(tmp_path) == {"prompt": "a"}  # any name may have a version
        return
    with pytest.raises(ValidationError, match="malformed") as caught:
        Sample.read(tmp_path) if name == SAMPLE else read_environment(tmp_path)
    assert caught.value.where == str(tmp_path / name)


def log(folder: Path, *steps: Step) -> None:
    writer = MetricsWriter(folder)
    for step in steps:
        writer.write(step)
    writer.close()


def test_what_a_run_skipped_is_what_its_log_passes_over(tmp_path: Path) -> None:
    config = {"data_loader": {"global_batch_size": 64, "skip": [[2, 3], [90, 95]]}}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    log(
        tmp_path,
        Step(step=1, tokens=64, rows=(1, 6), skipped=((2, 3),)),
        Step(step=2, tokens=128, rows=(8, 12), metrics={"optim/step skipped": 1.0}),
    )
    run = Run.read(str(tmp_path))
    assert run.skipped_so_far() == ((0, 1), (2, 3), (6, 8))
    assert run.skip() == ((0, 1), (2, 3), (6, 8), (90, 95))
    assert (run.last_step, run.not_taken) == (2, {2})


def test_without_a_configuration_the_log_says_the_batch_sizes(tmp_path: Path) -> None:
    steps = [Step(step=n, tokens=n * 64, rows=(4 * n - 4, 4 * n)) for n in (1, 2)]
    log(tmp_path, *steps)
    sizes = Run.read(str(tmp_path)).batch_sizes
    assert [sizes.size(step) for step in (0, 1)] == [64, 64]


def test_a_folder_that_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run folder"):
        Run.read(str(tmp_path))
    (tmp_path / CONFIG).write_text("{}")
    with pytest.raises(InputError, match="does not say its global batch size"):
        Run.read(str(tmp_path))
    (tmp_path / CONFIG).write_text('{"data_loader": {"global_batch_size": 64, "skip": [[3, 1]]}}')
    (tmp_path / METRICS).write_text("")
    with pytest.raises(ValidationError, match="malformed"):
        Run.read(str(tmp_path))


# Reports of bad steps are read back as they were written, and found in a folder.
DOCUMENT = BadDocument("id-1", "web.jsonl", 17, "line", "shard-0", 3, 0, 9)


BAD = BadStep(step=12, loss="nan", grad_norm="1.0", rows=[BadRow(96, "main", "web", [DOCUMENT])])


def test_a_report_comes_back_and_names_its_documents(tmp_path: Path) -> None:
    path = tmp_path / "spike-step00000012.json"
    BAD.write(path)
    assert BadStep.read(path) == BAD
    assert BAD.places() == ["web web.jsonl line 17"]


def test_they_are_found_by_step_and_nothing_else_is(tmp_path: Path) -> None:
    for name in ("spike-step00000012.json", "bad-step00000003.json", "x-step1.json", "bad-step"):
        (tmp_path / name).write_text("{}")
    found = [(step, kind) for step, kind, _ in bad_step_files(tmp_path)]
    assert found == [(3, "bad"), (12, "spike")]


GOLDEN_SAMPLES = (
    b'{"step":4,"time":1.5,"texts":[{"prompt":"a","text":"\xc3\xa9","finish":"length"}],'
    b'"temperature":0.8,"top_k":50,"seed":0,"version":1}\n'
)


def after(step: int, text: str = "x") -> StepSamples:
    texts = (WrittenText("a", text, "length"),)
    return StepSamples(step=step, time=1.5, texts=texts, temperature=0.8, top_k=50, seed=0)


def test_a_line_has_its_bytes_and_is_read_again(tmp_path: Path) -> None:
    assert read_samples(tmp_path) == []
    write_samples(tmp_path, after(4, "\u00e9"))
    assert (tmp_path / SAMPLES).read_bytes() == GOLDEN_SAMPLES
    assert read_samples(tmp_path) == [after(4, "\u00e9")]
    (tmp_path / SAMPLES).write_bytes(GOLDEN_SAMPLES.replace(b"seed", b"sead"))
    with pytest.raises(ValidationError, match="line 1"):
        read_samples(tmp_path)


def test_a_run_that_goes_back_writes_later_lines_anew(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        write_samples(tmp_path, after(step))
    forget_samples(tmp_path, after=4)
    assert [each.step for each in read_samples(tmp_path)] == [2, 4]
    forget_samples(tmp_path, after=9)
    write_samples(tmp_path, after(8))
    write_samples(tmp_path, after(4, "new"))
    assert read_samples(tmp_path) == [after(2), after(4, "new")]


def test_of_many_steps_the_first_the_last_and_some_between_are_shown() -> None:
    assert picked([]) == []
    assert [each.step for each in picked([after(1)])] == [1]
    steps = [each.step for each in picked([after(n) for n in range(101)], most=5)]
    assert steps == [0, 25, 50, 75, 100]
    assert len(picked([after(n) for n in range(7)])) == 7
