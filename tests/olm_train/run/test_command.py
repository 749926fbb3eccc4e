"""The command: quick help, mistakes with a message and an exit code, errors of one's own code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from support.forked import python
from support.ports import free_port
from support.runs import environment, run, write_config

from olm_data.config.values import Values
from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_train.distributed.world import World
from olm_train.run.command import Arguments, main, place_outside, print_config
from olm_train.run.config import RunConfig


@pytest.fixture
def config(tiny_mixture: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path / "train.yaml", tiny_mixture, tmp_path / "run")


def test_help_and_misspelled_options_answer_without_torch() -> None:
    code = (
        "import sys; from olm_train.run.command import main; codes = [main(['--help']), "
        "main(['--dryrun']), main(['none.yaml'])]; assert 'torch' not in sys.modules; print(codes)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    assert result.stdout.splitlines()[-1] == "[0, 2, 2]", result.stderr
    assert "--dry-run" in result.stderr  # the near miss
    assert "python -m olm_train.run train.yaml --dry-run" in result.stdout


def test_without_a_file_the_one_here_is_taken(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(config.parent)
    assert main(["--dry-run"]) == 0
    assert "24 steps of 256 tokens" in capsys.readouterr().out


def test_dry_run_prints_the_plan_and_writes_nothing(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(config), "--dry-run", "--train_module.optim.lr=3e-4"]) == 0
    out = capsys.readouterr().out
    for text in (
        "lr: 0.0003",  # the override, resolved
        "vocab_size: 512",  # from the lock
        "source prose",
        "stage anneal: 2,048 tokens, 64 rows: code 50.00%, prose 50.00%",
        "24 steps of 256 tokens: 6,144 tokens",
        "1 rank x 2 micro-batches of 128 tokens",
        "lr at step  4: 3.000e-04",
        "parameters",
        "FLOPs a token",
        "held: ",
    ):
        assert text in out
    assert not (config.parent / "run").exists()


def test_strict_flags_set_their_fields(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, field in (("--strict", "load_strict"), ("--strict-env", "strict")):
        for flags in ([], [flag]):
            assert main([str(config), "--dry-run", *flags]) == 0
            resolved = yaml.safe_load(capsys.readouterr().out.split("# mixture")[0])["trainer"]
            found = resolved | resolved["callbacks"]["environment"]
            assert found[field] == bool(flags)


def test_dry_run_describes_the_launched_number_of_ranks(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    arguments = [str(config), "--dry-run", "--train_module.rank_microbatch_size=64"]
    assert main(arguments) == 0
    assert "4 ranks x 1 micro-batch of 64 tokens" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")
    assert main(arguments) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("option", "code", "says"),
    [
        ("--model.d_modle=3", 2, "did you mean 'd_model'?"),
        ("--trainer.callbacks.checkpoint.save_interval=3", 2, "did you mean 'checkpointer'?"),
        ("--data_loader.global_batch_size=100", 2, "multiple"),
        ("--trainer.max_duration={value: 25, unit: steps}", 2, "the mixture lock holds 24"),
        ("--trainer.hard_stop={value: 3, unit: stpes}", 2, "did you mean 'steps'?"),
        ("--trainer.hard_stop=3", 2, "write --trainer.hard_stop='{value: 3, unit: steps}'"),
        ("--lr=3e-4", 2, "did you mean train_module.optim.lr?"),
        ("--optim.lr=3e-4", 2, "did you mean train_module.optim?"),
        ("--d_model=64", 2, "did you mean 'model' or model.d_model"),
        ("--train_module.optm.lr=3e-4", 2, "where: --train_module.optm.lr"),
        ("--model.vocab_size=100", 2, "smaller than the tokenizer's"),
        ("--model.preset=olm-1x", 2, "did you mean"),
        ("--model.feed_forward=geglue", 2, "did you mean 'geglu'?"),
        ("--model.positions.scaling={name: pi, factor: 0.5}", 2, "at least 1"),
        (
            "--model={d_model: 16, n_layers: 2, n_heads: 2, "
            "positions: {name: learned, max_positions: 16}}",
            2,
            "smaller than the lock's sequence length 32",
        ),
        ("--data_loader.mixture=none.lock.json", 4, "there is no mixture lock"),
        ("--trainer.callbacks.lm_evaluator.datasets.x=none", 4, "none"),
        ("--trainer.save_folder=weka://bucket/run", 2, "s3://"),
    ],
)
def test_a_mistake_has_a_message_and_an_exit_code(
    config: Path, capsys: pytest.CaptureFixture[str], option: str, code: int, says: str
) -> None:
    assert main([str(config), "--dry-run", option]) == code
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert says in message
    assert "Traceback" not in message


def test_debug_shows_the_traceback_and_keeps_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "train.yaml"
    config.write_text("data_loader: {mixture: gone.lock.json, global_batch_size: 8}\nmodel: {}\n")
    assert main([str(config), "--debug"]) == 4
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert "there is no mixture lock here" in shown
    (tmp_path / "file").touch()
    options = [f"--trainer.save_folder={tmp_path / 'file' / 'run'}", "--debug"]
    assert main([str(tmp_path / "none.yaml"), *options]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_save_folder_that_cannot_be_made_is_a_message_and_exit_5(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(config), f"--trainer.save_folder={config}"]) == 5
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert str(config) in message


def test_two_files_are_one_too_many(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(config), "other.yaml"]) == 2
    assert "two configuration files" in capsys.readouterr().err


@pytest.mark.slow
def test_under_torchrun_an_error_is_told_once(config: Path) -> None:
    result = run(config, "--model.d_modle=3", ranks=2)
    assert result.returncode == 1  # torchrun's own
    assert result.stderr.count("error: unknown field") == 1
    assert "exitcode  : 2" in result.stderr


def test_the_process_ends_without_taking_the_interpreter_apart() -> None:
    """Native threads that outlive the run abort a process that finalises its interpreter."""
    script = (
        "import atexit, runpy, sys\n"
        "class Late:\n"
        "    def __del__(self): print('finalised')\n"
        "sys.late = Late()\n"
        "sys.argv = ['run', '--no-such']\n"
        "from olm_data import errors\n"
        "errors.suggest = lambda *_: atexit.register(print, 'handlers ran') and ''\n"
        "runpy.run_module('olm_train.run', run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment()
    )
    assert result.returncode == 2, result.stderr
    assert result.stdout == "handlers ran\n"


def test_a_field_of_training_takes_its_value_as_the_next_word() -> None:
    given = Arguments.split(["a.yaml", "--train_module.optim.lr", "3e-4", "--seed", "7", "--debug"])
    assert given.overrides == ["--train_module.optim.lr=3e-4", "--seed=7"]
    assert (given.config, given.flags) == ("a.yaml", {"--debug"})


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["--dry-rnu", "a.yaml"], "did you mean '--dry-run'?"),
        (["--trainer.save_folder"], "--trainer.save_folder has no value"),
        (["--trainer.save_folder", "--debug"], "--trainer.save_folder has no value"),
        (["-x", "a.yaml"], "unknown option -x"),
    ],
)
def test_an_option_of_training_without_a_value_is_refused(typed: list[str], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        Arguments.split(typed)
    assert says in str(caught.value)


@pytest.mark.parametrize("given", [[], ["train.yaml"]])
def test_without_any_file_the_message_holds_one_that_trains_on_the_lock_here(
    given: list[str],
    tiny_mixture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "1 mine: 'best'.lock.json"
    shutil.copytree(tiny_mixture.parent, tmp_path, dirs_exist_ok=True)
    (tmp_path / tiny_mixture.name).rename(tmp_path / name)
    (tmp_path / name).touch()  # the newest that is whole
    (tmp_path / "damaged.lock.json").write_text("{}")
    assert main(given) == 2
    message = capsys.readouterr().err
    text = message.split("this is enough:\n")[1]
    (tmp_path / "train.yaml").write_text(textwrap.dedent(text))
    assert main(["--dry-run", "--data_loader.global_batch_size=4096"]) == 0  # the lock is short
    shown = yaml.safe_load(text)
    assert shown["data_loader"]["mixture"] == name
    assert shown["train_module"]["rank_microbatch_size"] % Lock.read(name).sequence_length == 0


def test_a_file_that_is_not_here_is_answered_by_the_one_that_is(
    tiny_mixture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_config(tmp_path / "train.yaml", tiny_mixture, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(["train.yml"]) == 2
    assert "did you mean 'train.yaml'?" in capsys.readouterr().err


BROKEN = """\
from dataclasses import dataclass

from olm_train import Callback


@dataclass(kw_only=True)
class Broken(Callback):
    def pre_step(self, batch):
        {"loss": 1.0}["los"]
"""


def test_a_hook_that_raises_is_named_with_its_line(
    tiny_mixture: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lab = tmp_path / "my_lab.py"
    lab.write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_lab", raising=False)
    config = write_config(tmp_path / "train.yaml", tiny_mixture, tmp_path / "run")
    assert main([str(config), "--trainer.callbacks.mine={name: my_lab:Broken}"]) == 1
    said = capsys.readouterr().err
    assert "unexpected error: KeyError: 'los'\n" in said
    assert f"  where: {lab}:9, in pre_step\n" in said


def test_a_package_of_the_user_is_installed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (packages / "user_package.py").write_text("def fail():\n    raise KeyError\n")
    monkeypatch.syspath_prepend(packages)
    fail = import_module("user_package").fail
    with pytest.raises(KeyError) as caught:
        fail()
    error = caught.value.with_traceback(caught.tb.tb_next)
    assert place_outside(error) is None


def test_calls_of_what_is_installed_are_passed_over() -> None:
    inner = None
    try:
        Path("nowhere").read_text()
    except OSError as error:
        inner = error.with_traceback(error.__traceback__.tb_next)  # type: ignore[union-attr]
    assert inner is not None
    assert place_outside(inner) is None


OWN = """
from dataclasses import dataclass
from olm_data.errors import InputError
from olm_train import Callback

@dataclass(kw_only=True)
class Fails(Callback):
    enabled: bool = True
    rank: int

    def post_step(self):
        if self.trainer.world.rank == self.rank:
            raise InputError(f"rank {self.rank} has had enough")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "met"), [(0, True), (1, True), (1, False)])
def test_an_error_of_any_rank_is_printed_once(
    tiny_mixture: Path, tmp_path: Path, rank: int, met: bool
) -> None:
    (tmp_path / "own_rank.py").write_text(OWN)
    config = write_config(tmp_path / "train.yaml", tiny_mixture, tmp_path / "run")
    option = f"--trainer.callbacks.boom={{name: 'own_rank:Fails', rank: {rank}}}"
    wrong = "--data_loader.mixture=none.lock.json"
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    paths = environment()
    paths["PYTHONPATH"] = f"{tmp_path}:{paths.get('PYTHONPATH', '')}"
    ranks = [
        subprocess.Popen(
            [python(), "-m", "olm_train.run", str(config), option]
            + ([] if met or number != rank else [wrong]),
            env=paths | address | {"RANK": str(number)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    said = ["", ""]
    said[rank] = ranks[rank].communicate(timeout=1200)[1]
    if not met:
        ranks[1 - rank].kill()  # it waits for the other one
    said[1 - rank] = ranks[1 - rank].communicate(timeout=1200)[1]
    assert ranks[rank].returncode != 0
    what = f"error: rank {rank} has had enough" if met else "none.lock.json"
    assert said[rank].count(what) == 1, said
    assert what not in said[1 - rank]


def test_it_names_the_fields_that_differ_from_a_run(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = Values.read(config)
    for option in ("--trainer.hard_stop={value: 1, unit: steps}", "--seed=7"):
        values.override(option)
    RunConfig.resolve(values).build(World()).fit()
    folder = tmp_path / "run"
    assert print_config([str(config), "--diff", str(folder), "--train_module.optim.lr=0.5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "seed: 7 -> 1",
        "train_module.optim.lr: 0.01 -> 0.5",
        "trainer.hard_stop: {'value': 1, 'unit': 'steps'} -> None",
    ]
    checkpoint = next(folder.glob("step*"))  # saved with each checkpoint too
    same = [f"--diff={checkpoint}", "--seed=7", "--trainer.hard_stop={value: 1, unit: steps}"]
    assert print_config([str(config), *same]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_it_takes_what_an_older_release_did_not_save_as_the_default(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = RunConfig.resolve(Values.read(config)).as_dict()
    del saved["train_module"]["compile_model"]
    (tmp_path / "old.json").write_text(json.dumps(saved))
    assert print_config([str(config), f"--diff={tmp_path / 'old.json'}"]) == 0
    assert capsys.readouterr().out == "no difference\n"
    saved["gone"] = 3
    (tmp_path / "old.json").write_text(json.dumps(saved))
    assert print_config([str(config), f"--diff={tmp_path / 'old.json'}"]) == 0
    out = capsys.readouterr().out
    assert "saved by another release: unknown field gone" in out
    assert "gone: 3 -> None" in out


def test_a_run_without_a_saved_configuration_is_refused(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_config([str(config), "--diff=none"]) == 4
    assert "no saved configuration" in capsys.readouterr().err
