"""Exports of real runs by the function and the command: proved, whole or not there, or refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from support.hf_exports import OLMO2, read, receipt_of, trained

from olm_data.errors import ConflictError, InputError, UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.model_receipt import ModelClaim
from olm_train.checkpoint.load import Checkpoint, open_checkpoint
from olm_train.checkpoint.portable import evaluation_model
from olm_train.distributed.world import World
from olm_train.extensions.averaging.merge import merge_checkpoints
from olm_train.extensions.hf_export import export as exporting
from olm_train.extensions.hf_export import job, verify
from olm_train.extensions.hf_export.command import main
from olm_train.extensions.hf_export.export import export, model_card, why_not_computed
from olm_train.extensions.hf_export.job import ExportOptions
from olm_train.extensions.hf_export.verify import lengths_of, prove
from olm_train.model.config import DecoderConfig
from olm_train.model.rope import YaRNScaling


@pytest.fixture(scope="module")
def checkpoint(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Of an OLMo 2, its vocabulary padded from 512 to 600."""
    folder = tmp_path_factory.mktemp("olmo2") / "run"
    return trained(tiny_mixture, folder, f"{OLMO2}, vocab_multiple: 100")


@pytest.fixture(scope="module")
def exported(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same exported in float32, in several files, computed with by transformers."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    options = ExportOptions(dtype="float32", shard_bytes=40_000, check="transformers")
    export(checkpoint, str(folder), options)
    return folder


def test_transformers_computes_what_the_checkpoint_does(exported: Path) -> None:
    verified = receipt_of(exported).verified
    model = verified.model
    assert model is not None
    assert model.model_class == "Olmo2ForCausalLM"
    assert model.largest_difference <= model.tolerance
    assert model.largest_difference < 1e-5 < model.largest_logit
    assert model.greedy_tokens == verify.NEW_TOKENS or model.greedy_tie
    assert model.stops_at == (0,)
    assert model.loss is not None
    assert model.loss.labels > 40
    assert verified.not_compared == ()
    assert len(verified.tokenizer_read_by) == 2


def test_files_are_those_that_readers_look_for(exported: Path, checkpoint: Checkpoint) -> None:
    files = sorted(path.name for path in exported.iterdir())
    index = read(exported / "model.safetensors.index.json")
    shards = sorted(set(index["weight_map"].values()))
    assert files == sorted(
        [
            *("README.md", "config.json", "generation_config.json", "olm-export.json"),
            *("model.safetensors.index.json", "special_tokens_map.json", "tokenizer.json"),
            *("tokenizer_config.json", *shards),
        ]
    )
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    tensors = {k: v for name in shards for k, v in load_file(exported / name).items()}
    assert index["weight_map"].keys() == tensors.keys() == receipt_of(exported).tensors.keys()
    sizes = index["metadata"]
    assert sizes["total_size"] == sum(4 * value.numel() for value in tensors.values())
    assert sizes["total_parameters"] == sum(value.numel() for value in tensors.values())
    assert tensors["model.embed_tokens.weight"].shape == (512, 32)  # the pads are cut off
    ours = dict(evaluation_model(checkpoint).named_parameters())
    qkv = torch.cat([tensors[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"])
    assert torch.equal(qkv, ours["blocks.1.attention.w_qkv.weight"])
    config = read(exported / "config.json")
    assert (config["eos_token_id"], config["vocab_size"]) == (0, 512)
    assert config["max_position_embeddings"] == 32  # of the mixture's rows
    assert read(exported / "generation_config.json")["eos_token_id"] == [0]
    assert (exported / "tokenizer.json").read_bytes() == checkpoint.read_bytes("tokenizer.json")
    card = (exported / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert checkpoint.manifest.digest in card
    assert checkpoint.manifest.lock_digest in card


def test_the_same_again_does_nothing_and_another_is_refused(
    exported: Path, checkpoint: Checkpoint
) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in exported.iterdir()}
    options = ExportOptions(dtype="float32", shard_bytes=40_000)
    assert export(checkpoint, str(exported), options).already
    with pytest.raises(ConflictError, match="holds something else"):
        export(checkpoint, str(exported), ExportOptions(dtype="bfloat16"))
    assert before == {path.name: path.stat().st_mtime_ns for path in exported.iterdir()}


def test_a_folder_with_anything_in_it_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ConflictError, match="holds something else"):
        export(checkpoint, str(tmp_path), ExportOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("installed", False, "transformers is not installed"),
        ("room_here", 1000, "more than half of this machine's memory"),
    ],
)
def test_why_it_was_not_computed_with_transformers_is_said(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: Any, name: str, found: int, said: str
) -> None:
    monkeypatch.setattr(verify, name, lambda: found)
    verified = export(checkpoint, str(tmp_path / "hf"), ExportOptions()).receipt.verified
    assert verified.model is None
    assert said in verified.not_compared[0]


def test_merged_weights_are_exported_as_their_mean(
    checkpoint: Checkpoint, tiny_mixture: Path, tmp_path: Path
) -> None:
    other = trained(tiny_mixture, tmp_path / "other", f"{OLMO2}, vocab_multiple: 100", "--seed=2")
    merged, _ = merge_checkpoints([checkpoint, other], [3, 1], tmp_path / "other/mean")
    options = ExportOptions(dtype="float32", check="transformers")
    receipt = export(open_checkpoint(merged, World()), str(tmp_path / "hf"), options).receipt
    model = receipt.verified.model
    assert model is not None
    assert model.loss is not None
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    one, two = (dict(evaluation_model(each).named_parameters()) for each in (checkpoint, other))
    for ours, theirs in (("embeddings", "model.embed_tokens"), ("norm", "model.norm")):
        name = f"{ours}.weight"
        mean = 0.75 * one[name].double() + 0.25 * two[name].double()
        assert torch.equal(tensors[f"{theirs}.weight"], mean.float()[:512])
    card = (tmp_path / "hf" / "README.md").read_text()
    assert open_checkpoint(merged, World()).manifest.digest in card


def test_a_tied_head_is_left_out_unless_asked_for(tiny_mixture: Path, tmp_path: Path) -> None:
    model = (
        "d_model: 16, n_layers: 1, n_heads: 2, feed_forward: {hidden_size: 32}, head: {tied: true}"
    )
    tied = trained(tiny_mixture, tmp_path / "run", model)
    once = export(tied, str(tmp_path / "once"), ExportOptions(dtype="float32")).receipt
    twice = export(
        tied, str(tmp_path / "twice"), ExportOptions(dtype="float32", tied_head=True)
    ).receipt
    assert "lm_head.weight" not in once.tensors
    assert twice.tensors["lm_head.weight"] == once.tensors["model.embed_tokens.weight"]
    assert once.parameters == twice.parameters
    for receipt in (once, twice):
        assert receipt.model_class == "LlamaForCausalLM"
        assert receipt.verified.model is not None


def test_a_model_that_no_family_has_is_refused_with_its_field_before_anything_is_written(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    gelu = OLMO2.replace("hidden_size", "name: gelu, hidden_size")
    odd = trained(tiny_mixture, tmp_path / "run", gelu)
    with pytest.raises(UsageError, match="feed_forward is gelu") as error:
        export(odd, str(tmp_path / "hf"), ExportOptions())
    assert error.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_loss_is_not_compared_where_the_data_are_gone(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    alone = tmp_path / "moved" / "far" / "away" / "step00000002"
    shutil.copytree(checkpoint.folder, alone)
    moved = open_checkpoint(alone, World())
    verified = export(
        moved, str(tmp_path / "hf"), ExportOptions(check="transformers")
    ).receipt.verified
    assert verified.model is not None
    assert verified.model.loss is None
    assert "loss of rows of the mixture" in verified.not_compared[0]


SMALL = "d_model: 32, n_layers: 2, n_heads: 4"


QWEN2 = (
    f"{SMALL}, n_kv_heads: 2, feed_forward: {{hidden_size: 48}}, "
    "attention: {bias: qkv, sliding_window: WINDOWS}"
)


GPT2 = (
    f"{SMALL}, positions: {{name: learned, max_positions: 64}}, head: {{tied: true}}, "
    "norm: {name: layer_norm, bias: true}, attention: {bias: all}, "
    "feed_forward: {name: gelu, hidden_size: 128, bias: true}"
)


@pytest.mark.parametrize(
    ("model", "wanted", "name", "zeros"),
    [
        (
            QWEN2.replace("WINDOWS", "null"),
            "LlamaForCausalLM",
            "model.layers.1.self_attn.o_proj.bias",
            True,
        ),
        (
            QWEN2.replace("WINDOWS", "[-1, 8]"),
            "SmolLM3ForCausalLM",
            "model.layers.1.self_attn.o_proj.bias",
            True,
        ),
        (GPT2, "GPT2LMHeadModel", "h.1.attn.c_proj.weight", False),
    ],
    ids=["Qwen 2", "Qwen 2 with windows", "GPT-2"],
)
def test_what_readers_take_otherwise_is_written_as_what_computes_the_same(
    tiny_mixture: Path, tmp_path: Path, model: str, wanted: str, name: str, zeros: bool
) -> None:
    checkpoint = trained(tiny_mixture, tmp_path / "run", model)
    export(checkpoint, str(tmp_path / "hf"), ExportOptions(dtype="float32", check="transformers"))
    verified = receipt_of(tmp_path / "hf").verified
    assert verified.model is not None
    assert verified.model.model_class == wanted
    assert verified.model.largest_difference < 1e-5
    assert len(verified.tokenizer_read_by) == 2
    assert load_file(tmp_path / "hf" / "model.safetensors")[name].any() != zeros


def test_a_folder_that_computes_otherwise_is_never_there(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = trained(tiny_mixture, tmp_path / "run", OLMO2)
    whole = job.rounded
    monkeypatch.setattr(job, "rounded", lambda value, planned: whole(value, planned) * 1.01)
    with pytest.raises(ValidationError, match="gives logits that differ by"):
        exporting.export(checkpoint, str(tmp_path / "hf"), ExportOptions(check="transformers"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    found = job.ExportJob(
        checkpoint, ExportOptions(check="files"), exporting.model_config(checkpoint)
    )
    assert why_not_computed(found).endswith("--verify files")


def test_no_address_in_the_lock_of_a_run_is_asked(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    shutil.copytree(tiny_mixture.parent, tmp_path / "mixture")
    lock = tmp_path / "mixture" / tiny_mixture.name
    checkpoint = trained(lock, tmp_path / "run", OLMO2)
    found = job.ExportJob(
        checkpoint, ExportOptions(check="files"), exporting.model_config(checkpoint)
    )
    assert exporting._rows(found)
    value = json.loads(lock.read_bytes())
    value["locations"] = dict.fromkeys(value["locations"], "s3://b/data")
    lock.write_text(json.dumps(value))
    with pytest.raises(InputError, match="which only you may open"):
        exporting._rows(found)


CLAIM = ModelClaim(
    checkpoint="c" * 64, dtype="float32", shard_bytes=5, tied_head=False, template=None, context=32
)


def card(lock: Lock | None, *, chat: bool = False, has_tokenizer: bool = True) -> str:
    job: Any = SimpleNamespace(
        claim=CLAIM,
        family=SimpleNamespace(architecture="Olmo2ForCausalLM"),
        config=SimpleNamespace(num_params=1234),
        checkpoint=SimpleNamespace(step=3),
        lock=lock,
        template="{{ messages }}" if chat else None,
        tokenizer=has_tokenizer or None,
    )
    return model_card(job).decode()


def test_the_card_names_what_the_model_was_made_of(tiny_mixture: Path) -> None:
    lock = Lock.read(tiny_mixture)
    text = card(lock, chat=True)
    front = yaml.safe_load(text.split("---")[1])
    assert front["library_name"] == "transformers"
    assert front["tags"] == ["olm-data", "conversational"]
    for digest in (CLAIM.checkpoint, lock.digest, *(each.dataset for each in lock.sources)):
        assert f"`{digest}`" in text
    assert lock.folder not in text
    assert "AutoTokenizer" in text


def test_what_there_is_not_is_not_shown() -> None:
    text = card(None, has_tokenizer=False)
    assert "mixture lock" not in text
    assert "There is no tokenizer with this model" in text
    assert yaml.safe_load(text.split("---")[1])["tags"] == ["olm-data"]


@pytest.fixture(scope="module")
def run(checkpoint: Checkpoint) -> Path:
    return Path(checkpoint.folder).parent


def test_a_run_becomes_a_folder_and_says_what_was_proved(run: Path, tmp_path: Path) -> None:
    hf = str(tmp_path / "hf")
    done = CliRunner().invoke(main, [str(run), "--to", "hf", "--output", hf])
    assert done.exit_code == 0, done.output
    for part in ("model class  Olmo2ForCausalLM", "step         2", "greedy tokens  ", "loss"):
        assert part in done.stdout
    assert done.stderr.endswith(f"written: {hf}\n")
    again = CliRunner().invoke(main, [str(run), "--to", "hf", "--output", hf])
    assert again.stderr.endswith(f"already there: {hf}\n")


def test_each_option_has_its_effect(run: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}")
    options = ["--dtype", "float16", "--shard-size", "20KB", "--context", "77", "--verify", "files"]
    options += ["--write-tied-head", "--chat-template", str(template), "--json"]
    hf = tmp_path / "hf"
    done = CliRunner().invoke(main, [str(run), "--to", "hf", "--output", str(hf), *options])
    assert done.exit_code == 0, done.output
    receipt = receipt_of(hf)
    assert json.loads(done.stdout)["claim"] == read(hf / "olm-export.json")["claim"]
    assert (receipt.claim.dtype, receipt.claim.shard_bytes) == ("float16", 20_000)
    assert receipt.claim.tied_head is False  # the head of this model is its own
    assert receipt.verified.model is None
    assert receipt.verified.not_compared[0].endswith("loss: --verify files")
    assert len(receipt.verified.tokenizer_read_by) == 2, "ids are compared all the same"
    assert len(list(hf.glob("model-*.safetensors"))) > 2
    assert read(hf / "config.json")["max_position_embeddings"] == 77
    assert (hf / "chat_template.jinja").read_text() == template.read_text()


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--dtype", "float32"], 2, "--dtype is for --to hf"),
        (["--verify", "files"], 2, "--verify is for --to hf"),
        (["--to", "hf", "--shard-size", "big"], 2, "'big' is not a size"),
        (["--to", "hf", "--chat-template", "none"], 4, "there is no such template"),
    ],
)
def test_options_without_effect_or_sense_are_refused(
    run: Path, tmp_path: Path, options: list[str], code: int, says: str
) -> None:
    out = str(tmp_path / "out")
    done = CliRunner().invoke(main, [str(run), "--output", out, *options])
    assert done.exit_code == code
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_export_writes_over_an_export_and_nothing_else(run: Path, tmp_path: Path) -> None:
    def export(output: Path) -> Result:
        return CliRunner().invoke(main, [str(run), "--output", str(output)])

    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    done = export(run)
    assert done.exit_code == 7
    assert "holds config.json" in done.stderr
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    mine = tmp_path / "tokenizer.json"
    mine.write_text("mine")
    assert export(tmp_path).exit_code == 7
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    for _ in range(2):
        assert export(tmp_path / "new").exit_code == 0


SIZES: dict[str, Any] = {"vocab_size": 64, "d_model": 16, "n_layers": 2, "n_heads": 2}


@pytest.fixture
def folder(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    export(checkpoint, str(tmp_path / "hf"), ExportOptions(dtype="float32", check="files"))
    return tmp_path / "hf"


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def another_base(folder: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10_500.0}
    change(folder / "config.json", rope_parameters=rope, rope_theta=10_500.0)


def another_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"] *= 1.01
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def swapped_layers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    one, two = (f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1))
    tensors[one], tensors[two] = tensors[two], tensors[one]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def another_epsilon(folder: Path) -> None:
    change(folder / "config.json", rms_norm_eps=1e-3)


@pytest.mark.parametrize("spoil", [another_base, another_weight, swapped_layers, another_epsilon])
def test_other_logits_are_found(
    checkpoint: Checkpoint, folder: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(folder)
    with pytest.raises(ValidationError, match="gives logits that differ by"):
        prove(folder, evaluation_model(checkpoint), (0,), ())


def test_generation_that_does_not_stop_is_found(checkpoint: Checkpoint, folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=[5])
    with pytest.raises(ValidationError, match=r"does not stop at the id 0|text ended early"):
        prove(folder, evaluation_model(checkpoint), (0,), ())


def test_another_loss_is_found(checkpoint: Checkpoint, folder: Path) -> None:
    ids = torch.arange(1, 9)
    good = (ids, torch.tensor([*range(2, 9), -100]), torch.tensor([0] * 4 + [4] * 4))
    model = evaluation_model(checkpoint)
    proof = prove(folder, model, (0,), [good])
    assert proof.loss is not None
    assert proof.loss.labels == 7
    assert proof.loss.ours == pytest.approx(proof.loss.theirs, abs=1e-6)
    forward = model.forward
    model.forward = lambda ids, **given: forward(ids, **{**given, "doc_start": None})  # type: ignore
    with pytest.raises(ValidationError, match="the loss of rows of the mixture is"):
        prove(folder, model, (0,), [good])


def test_prompts_are_longer_than_windows_and_the_context_before_scaling() -> None:
    plain = DecoderConfig(**SIZES)
    assert len(lengths_of(plain)) == 3
    windows = DecoderConfig(**SIZES, attention={"sliding_window": (100, 7)})
    assert len(lengths_of(windows)) == 3
    assert max(lengths_of(windows)) > 100
    scaled = DecoderConfig(
        **SIZES, positions={"scaling": YaRNScaling(factor=2.0, old_context_len=300)}
    )
    assert max(lengths_of(scaled)) > 300
    learned = DecoderConfig(**SIZES, positions={"name": "learned", "max_positions": 20})
    assert lengths_of(learned) == (17, 20)
