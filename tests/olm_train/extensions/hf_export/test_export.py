"""Exports of real runs: files proved by other programs, whole or not there, refused in time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.hf_exports import OLMO2, read, receipt_of, trained

from olm_data.errors import ConflictError, UsageError
from olm_train.checkpoint.load import Checkpoint, open_checkpoint
from olm_train.checkpoint.portable import evaluation_model
from olm_train.distributed.world import World
from olm_train.extensions.averaging.merge import merge_checkpoints
from olm_train.extensions.hf_export import verify
from olm_train.extensions.hf_export.export import export
from olm_train.extensions.hf_export.job import ExportOptions


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


def test_a_receipt_says_no_more_than_was_compared(checkpoint: Checkpoint, tmp_path: Path) -> None:
    result = export(checkpoint, str(tmp_path / "hf"), ExportOptions(check="files"))
    verified = result.receipt.verified
    assert verified.model is None
    assert any("logits, greedy text and loss: --verify files" in w for w in verified.not_compared)
    assert len(verified.tokenizer_read_by) == 2, "ids are compared all the same"


def test_without_transformers_it_says_that_logits_were_not_compared(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "installed", lambda: False)
    verified = export(checkpoint, str(tmp_path / "hf"), ExportOptions()).receipt.verified
    assert verified.model is None
    assert "transformers is not installed" in verified.not_compared[0]


def test_a_model_too_large_for_the_memory_is_not_computed_with(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "room_here", lambda: 1000)
    verified = export(checkpoint, str(tmp_path / "hf"), ExportOptions()).receipt.verified
    assert verified.model is None
    assert "more than half of this machine's memory" in verified.not_compared[0]


def test_dtype_and_shard_size_have_their_effect(checkpoint: Checkpoint, tmp_path: Path) -> None:
    export(checkpoint, str(tmp_path / "hf"), ExportOptions(dtype="bfloat16", check="files"))
    tensors = load_file(tmp_path / "hf" / "model.safetensors")  # small: a single file
    ours = dict(evaluation_model(checkpoint).named_parameters())
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert torch.equal(tensors["model.norm.weight"], ours["norm.weight"].bfloat16())
    assert not (tmp_path / "hf" / "model.safetensors.index.json").exists()
    assert read(tmp_path / "hf" / "config.json")["dtype"] == "bfloat16"


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
