"""Trains a recipe of this folder small, on a CPU: `python pipelines/twin.py olmo2-1b`.

mix.yaml and train.yaml of each stage stay as they are but for sizes: tokens, length of rows, width,
layers, batch, warm-up. Each source is a part of this machine's Python library, under a line of its
own. So what is tried is the recipe's shape: block, optimiser, schedule, packing, stages, and
that a stage begins with what the one before left. Losses say nothing about the recipe's.

    pipelines/NAME/{mix,train}*.yaml -> pipelines/NAME/out/twin/{mix*.yaml, tokens/, runs/}
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

import yaml

import olm_data
from olm_data.cli import cli
from olm_train.model.presets import preset_fields
from olm_train.run.command import main as train

HERE = Path(__file__).resolve().parent
ROW, TOKENS = 64, 20_000
SIZES = {"n_layers": 4, "d_model": 64, "n_heads": 2, "n_kv_heads": 1, "head_dim": 32}
FEED_FORWARD = {"hidden_size": 64, "n_experts": 4, "top_k": 2}
RUN = [
    *("--data_loader.global_batch_size=512", "--train_module.rank_microbatch_size=512"),
    *("--train_module.cp_config=null", "--train_module.float8_config=null", "--parallel=null"),
    *("--trainer.hard_stop=null", "--trainer.callbacks.lm_evaluator.eval_interval=1000"),
]


def shape(model: dict[str, object]) -> list[str]:
    """Return the options that make a model small; what the recipe leaves out stays so."""
    if "depth" in model:
        return ["--model.depth=1"]
    fields = {**(preset_fields(str(model["preset"])) if "preset" in model else {}), **model}
    inner = fields.get("feed_forward") or {}
    inner |= {k: v for k, v in FEED_FORWARD.items() if k == "hidden_size" or k in inner}
    sizes = {k: v for k, v in SIZES.items() if not k.endswith(("kv_heads", "dim")) or k in fields}
    return [f"--model.{k}={v}" for k, v in {**sizes, "feed_forward": json.dumps(inner)}.items()]


def tokenize(folder: Path, sources: list[str]) -> None:
    """Write `tokens/SOURCE` for each source, and its held-out part."""
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:10]
    text = "".join(path.read_text("utf-8") for path in library)
    texts = [text[start : start + 4000] for start in range(0, len(text), 4000)]
    write(folder / "all.jsonl", texts)
    words = ["train-tokenizer", str(folder / "all.jsonl"), "--vocab-size=512"]
    cli.main([*words, f"--output={folder / 'tokenizer.json'}"], standalone_mode=False)
    for name in sources:
        write(folder / f"{name}.jsonl", [f"# {name}\n{text}" for text in texts])
        olm_data.tokenize(
            folder / f"{name}.jsonl",
            tokenizer=folder / "tokenizer.json",
            output=folder / "tokens" / name,
            holdout=0.2,
            workers=1,
        )


def write(path: Path, texts: list[str]) -> None:
    """Write texts as JSON Lines."""
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))


def main(name: str, folder: Path) -> int:
    """Train the twin of recipe `name` in `folder`, which is new; return the exit code."""
    folder.mkdir(parents=True)
    stages = sorted((HERE / name).glob("train*.yaml"), key=lambda path: len(path.stem))
    mixes = [yaml.safe_load(path.with_name(mix_of(path)).read_text()) for path in stages]
    tokenize(folder, sorted({source for mix in mixes for source in mix["sources"]}))
    for path, mix in zip(stages, mixes, strict=True):
        mix["sequence_length"] = ROW
        for source in mix["sources"].values():
            source["max_epochs"] = 100
        for stage in mix["stages"]:
            stage["tokens"] = TOKENS // len(mix["stages"])
        (folder / mix_of(path)).write_text(yaml.safe_dump(mix))
        olm_data.mix(folder / mix_of(path))
        recipe = yaml.safe_load(path.read_text())
        (folder / path.name).write_text(path.read_text())
        options = shape(recipe["model"]) + RUN
        if recipe["train_module"]["scheduler"].get("warmup"):
            options.append("--train_module.scheduler.warmup=2")
        if str(recipe["trainer"].get("load_path", "")).startswith("hf://"):
            options += ["--trainer.load_path=null", "--trainer.load_trainer_state=true"]
            options += ["--trainer.load_optim_state=true"]
        if code := train([str(folder / path.name), *options]):
            return code
    return 0


def mix_of(path: Path) -> str:
    """Return the name of the manifest that belongs to a `train*.yaml`."""
    return path.name.replace("train", "mix", 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], HERE / sys.argv[1] / "out" / "twin"))
