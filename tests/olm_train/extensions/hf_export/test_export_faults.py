"""Exports where things go wrong or are elsewhere, and other programs that read them."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command import WITH_TESTS
from support.distributed import run_ranks
from support.forked import forked
from support.hf_exports import OLMO2, OLMOE, QUIET, QWEN3_MOE, receipt_of, trained
from support.polling import wait_until
from support.runs import build_trainer, environment, group_world

from olm_data.errors import ConflictError
from olm_data.storage.destination import RECORD
from olm_data.storage.store import Store
from olm_train.checkpoint.load import Checkpoint, open_checkpoint
from olm_train.checkpoint.portable import evaluation_model
from olm_train.distributed.world import World
from olm_train.extensions.hf_export.beside import Beside
from olm_train.extensions.hf_export.export import export
from olm_train.extensions.hf_export.job import ExportOptions

pytestmark = pytest.mark.slow  # servers, ranks and processes that are killed
OPTIONS = ExportOptions(dtype="float32", shard_bytes=20_000, check="files")


@pytest.fixture(scope="module")
def checkpoint(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return trained(tiny_mixture, tmp_path_factory.mktemp("faults") / "run", OLMO2)


def _rank(lock: Path, folder: Path, model: str) -> None:
    fsdp = "--train_module.dp_config={name: fsdp}"
    build_trainer(lock, folder, f"--model={{{model}}}", *QUIET, fsdp, world=group_world()).fit()


def test_a_checkpoint_of_two_sharded_ranks_is_exported_as_that_of_one(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    run_ranks(_rank, 2, tiny_mixture, tmp_path / "run", OLMO2)
    sharded = open_checkpoint(tmp_path / "run" / "step00000002", World())
    assert len(sharded.index.files) == 2
    whole = export(sharded, str(tmp_path / "hf"), OPTIONS).receipt
    assert whole.model_class == "Olmo2ForCausalLM"
    computed = export(sharded, str(tmp_path / "bf16"), ExportOptions(check="transformers")).receipt
    assert computed.verified.model is not None
    assert computed.verified.model.loss is not None
    # the same bytes as of the checkpoint that one process writes of these weights
    copy = tmp_path / "one"
    words = ("merge", sharded.folder, "--out", copy)
    assert forked("olm_train.cli", *words, environment=environment()).returncode == 0
    single = export(open_checkpoint(copy, World()), str(tmp_path / "single"), OPTIONS).receipt
    assert single.tensors == whole.tensors


def test_in_a_bucket_the_export_is_whole_and_the_same(
    checkpoint: Checkpoint, s3: dict[str, str], tmp_path: Path
) -> None:
    url = f"s3://{s3['bucket']}/exports/one"
    far = export(checkpoint, url, OPTIONS).receipt
    near = export(checkpoint, str(tmp_path / "near"), OPTIONS).receipt
    assert far == near
    store = Store(url)
    names = {entry.name: entry.modified for entry in store.entries()}
    assert set(names) == {*far.files, RECORD}
    for name, file in far.files.items():
        assert store.sha256(name) == file.sha256
    assert export(checkpoint, url, OPTIONS).already
    with pytest.raises(ConflictError, match="holds something else"):
        export(checkpoint, url, ExportOptions(check="files"))
    computed = ExportOptions(dtype="float32", check="transformers")
    proved = export(checkpoint, f"{url}-computed", computed).receipt
    assert proved.verified.model is not None


def _killed(checkpoint: Checkpoint, output: str, after: float) -> int:
    """Start the command, kill it so many seconds after its first shard; return its exit code."""
    command = ["olm_train.cli", "export", checkpoint.folder, "--to", "hf", "--output", output]
    options = ["--dtype", "float32", "--shard-size", "2KB", "--verify", "files"]
    child = subprocess.Popen(
        [sys.executable, "-m", *command, *options],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: child.poll() is not None or _begun(output), "a start", seconds=600)
        child.wait(after)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGKILL)
    return child.wait()


def _begun(output: str) -> bool:
    if "://" in output:
        return bool(Store(output).entries())
    return any(Path(output).parent.glob(f".{Path(output).name}.exporting-0*"))


@pytest.mark.parametrize("where", ["local", "bucket"])
def test_a_kill_leaves_nothing_that_reads_as_whole_and_a_rerun_goes_on(
    checkpoint: Checkpoint, s3: dict[str, str], tmp_path: Path, where: str
) -> None:
    output = str(tmp_path / "hf") if where == "local" else f"s3://{s3['bucket']}/killed/hf"
    options = ExportOptions(dtype="float32", shard_bytes=2_000, check="files")
    rule = random.Random(len(where))
    for _ in range(2):
        code = _killed(checkpoint, output, rule.uniform(0.0, 0.2 if where == "local" else 1.5))
        there = Path(output).exists() if where == "local" else Store(output).exists(RECORD)
        if there:  # the kill came after the last write
            assert export(checkpoint, output, options).already
            break
        assert code == -signal.SIGKILL
    receipt = export(checkpoint, output, options).receipt
    whole = export(checkpoint, str(tmp_path / "whole"), options).receipt
    assert receipt == whole
    if where == "local":
        left = {path.name for path in tmp_path.iterdir()} - {"hf", "whole"}
        assert all(name.startswith(".hf.exporting-lease-") for name in left)
        assert receipt_of(Path(output)) == whole
    else:
        left = {e.name for e in Store(output).entries()} - {*whole.files, RECORD}
        assert all(name.startswith(".") for name in left)  # a claim, a lease of one that was killed


MEASURE = """
import sys
from support.memory import peak
from olm_train.checkpoint.load import open_checkpoint
from olm_train.distributed.world import World
from olm_train.extensions.hf_export.export import export
from olm_train.extensions.hf_export.job import ExportOptions
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # which the ids are compared with
found = open_checkpoint(sys.argv[1], World())
before = peak()
options = ExportOptions(dtype="float32", shard_bytes=int(sys.argv[3]), check="files")
export(found, sys.argv[2], options)
print(before, peak())
"""


def test_memory_is_about_one_file_and_one_tensor(tiny_mixture: Path, tmp_path: Path) -> None:
    large = "d_model: 512, n_layers: 4, n_heads: 8, feed_forward: {hidden_size: 2048}"
    folder = trained(tiny_mixture, tmp_path / "run", large)
    weights = 4 * sum(
        entry.elements for n, entry in folder.index.tensors.items() if n.startswith("model.")
    )
    shard = 8_000_000
    assert weights > 8 * shard
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, folder.folder, str(tmp_path / "hf"), str(shard)],
        env=environment() | WITH_TESTS, capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    before, peak = (1024 * int(number) for number in done.stdout.split())
    tensor = 4 * 512 * 2048
    # read, put in place, given to the file: three copies of one tensor, and a file read back
    assert peak - before < shard + 4 * tensor + 30_000_000 < weights
    assert json.loads((tmp_path / "hf" / "olm-export.json").read_text())["verified"]


@dataclass
class Places:
    checkpoint: str
    folder: Path

    def order(self, name: str) -> list[str]:
        return [self.checkpoint, "--to=hf", f"--output={self.folder / name}", "--verify=files"]


@pytest.fixture(scope="module")
def places(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Places:
    folder = tmp_path_factory.mktemp("beside")
    return Places(trained(tiny_mixture, folder / "run", OLMO2).folder, folder)


def test_a_child_that_is_ended_leaves_no_folder(places: Places) -> None:
    child = Beside(places.order("ended"), places.folder / "log")
    child.end()
    assert not (places.folder / "ended").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(child.process_id, 0)


def test_a_child_ends_with_its_parent(places: Places) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from olm_train.extensions.hf_export.beside import Beside\n"
        "child = Beside(sys.argv[2:], Path(sys.argv[1]))\n"
        "os.kill(child.process_id, 19)\n"  # it stands still, so that it cannot be done before
        "print(child.process_id, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    arguments = [str(places.folder / "log"), *places.order("orphan")]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, timeout=1200
    )
    pid = int(done.stdout)
    os.kill(pid, 18)
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), "its end", seconds=600)


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


READ = """
import json, sys
import mlx.core as mx
from mlx_lm.utils import load
ids, found = json.loads(sys.argv[1]), {}
for folder in sys.argv[2:]:
    model, tokenizer = load(folder)
    greedy = list(ids)
    for _ in range(12):
        greedy.append(int(mx.argmax(model(mx.array([greedy]))[0, -1])))
    logits = model(mx.array([ids]))[0].astype(mx.float32).tolist()
    found[folder] = {"logits": logits, "greedy": greedy, "ends": sorted(tokenizer.eos_token_ids)}
print(json.dumps(found))
"""
LLAMA3 = (
    "d_model: 32, n_layers: 2, n_heads: 4, n_kv_heads: 2, feed_forward: {hidden_size: 48}, "
    "head: {tied: true}, "
    "positions: {name: rope, scaling: {name: llama3, factor: 4, old_context_len: 16}}"
)


GPT2 = (
    "d_model: 32, n_layers: 2, n_heads: 4, head: {tied: true}, attention: {bias: all}, "
    "positions: {name: learned, max_positions: 64}, norm: {name: layer_norm, bias: true}, "
    "feed_forward: {name: gelu, hidden_size: 128, bias: true}"
)


MODELS = {
    "OLMo 2": OLMO2, "Llama 3, tied": LLAMA3, "GPT-2": GPT2,
    "OLMoE": OLMOE, "Qwen 3 MoE": QWEN3_MOE,
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="mlx computes on the CPU under Linux")
def test_mlx_computes_the_same(tiny_mixture: Path, tmp_path: Path) -> None:
    ids = torch.randint(512, (1, 50), generator=torch.Generator().manual_seed(3))
    checkpoints = {}
    for name, model in MODELS.items():
        checkpoint = trained(tiny_mixture, tmp_path / name / "run", model)
        folder = str(tmp_path / name / "hf")
        export(checkpoint, folder, ExportOptions(dtype="float32", check="files"))
        checkpoints[folder] = checkpoint
    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(ids[0].tolist()), *checkpoints],
        env=environment(), capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for name, found in json.loads(done.stdout.splitlines()[-1]).items():
        ours = evaluation_model(checkpoints[name])
        with torch.no_grad():
            difference = (torch.tensor(found["logits"]) - ours(ids)[0]).abs().max()
            greedy = ids
            for _ in range(12):
                greedy = torch.cat((greedy, ours(greedy)[:, -1:].argmax(-1)), dim=1)
        assert difference <= 1e-4, name
        assert found["greedy"] == greedy[0].tolist(), name
        assert found["ends"] == [0], name


TEMPLATE = """\
{%- for m in messages %}{{ '<' + m.role + '>' + m.content + '\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{%- endif %}"""


def test_dpo_goes_on_from_an_export(tiny_mixture: Path, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    checkpoint = trained(tiny_mixture, tmp_path / "run", OLMO2)
    options = ExportOptions(dtype="float32", check="files", template=TEMPLATE)
    export(checkpoint, str(tmp_path / "hf"), options)

    def turn(role: str, content: str) -> list[dict[str, str]]:
        return [{"role": role, "content": content}]

    pairs = datasets.Dataset.from_list(
        [
            {
                "prompt": turn("user", f"the fox {n}"),
                "chosen": turn("assistant", "jumps"),
                "rejected": turn("assistant", "sleeps"),
            }
            for n in range(8)
        ]
    )
    trainer = trl.DPOTrainer(
        model=str(tmp_path / "hf"),
        args=trl.DPOConfig(
            output_dir=str(tmp_path / "dpo"),
            max_steps=6,
            learning_rate=1e-2,
            per_device_train_batch_size=8,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": torch.float32},
        ),
        train_dataset=pairs,
    )
    trainer.train()
    losses: list[Any] = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)  # it is its own reference
    assert losses[-1] < 0.8 * losses[0]
