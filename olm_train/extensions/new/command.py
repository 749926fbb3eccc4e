"""The command that writes a folder to train in: `olm-train new mine --data ./text`.

files under --data -> sources and bytes -> Plan -> NAME/README.md, mix.yaml, train.yaml
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
import yaml

from olm_data.bounded_json import JsonObject
from olm_data.command import Command
from olm_data.config.schema import modeline
from olm_data.errors import ConflictError, InputError, UsageError, suggest
from olm_data.extras import needs
from olm_data.mixture.schema import PATH as MIXTURE
from olm_data.printing import emit

with needs("planning a model"):
    from olm_train.estimate.gpus import gpu_named
    from olm_train.extensions.new.plan import Plan, plan
    from olm_train.model.presets import PRESETS
    from olm_train.run.reference import PATH as TRAINING

ALSO = {"gpt2-124m": "gpt2-small", "gpt2-355m": "gpt2-medium"}
"""Other names of presets that people type."""
READ = re.compile(r"\.(jsonl|json|txt|csv|tsv|parquet|arrow|html?|warc|pdf)(\.(gz|zst))?$", re.I)
PACKED = 4
"""Bytes of text in a byte of a compressed file, about."""


@click.command(cls=Command)
@click.argument("name")
@click.option("--data", required=True, help="Folder or file of text; each subfolder is a source.")
@click.option("--preset", "shape", help="Shape of the model. [default: by the amount of text]")
@click.option("--gpu", help="Kind of accelerator, such as h100. [default: none, a CPU]")
@click.option("--json", "as_json", is_flag=True, help="Print what was decided as JSON.")
def main(name: str, data: str, shape: str | None, gpu: str | None, as_json: bool) -> None:
    """Write folder NAME with a mixture, a configuration and the commands for your text.

    \b
    olm-train new mine --data ./text
    olm-train new mine --data ./text --preset gpt2-124m --gpu h100

    Each value stands beside its reason; change what you know better. Nothing is tokenised.
    """
    shape = ALSO.get(shape or "", shape)
    if shape is not None and shape not in PRESETS:
        known = {**PRESETS, **ALSO}
        raise UsageError(
            f"unknown model preset {shape!r}", where="--preset", fix=suggest(shape, known)
        )
    folder = Path(name)
    if folder.exists():
        raise ConflictError("the folder is there", where=name, fix="take another name")
    sources = sources_of(Path(data))
    made = plan(sum(sources.values()), shape, gpu_named(gpu) if gpu else None)
    places = {one: os.path.relpath(Path(data, one), folder) for one in sources}
    if list(sources) == [Path(data).stem]:
        places = {Path(data).stem: os.path.relpath(data, folder)}
    files = {
        "mix.yaml": mix_yaml(made, list(sources)),
        "train.yaml": train_yaml(made, list(sources)),
        "README.md": readme(made, folder.name, places),
    }
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(text)
    facts = {
        "folder": name, "preset": made.preset, "bytes": sum(sources.values()),
        "tokens": made.tokens, "epochs": made.epochs, "parameters": made.model.num_params,
    }  # fmt: skip
    said = [
        f"{key} {value:,}" if isinstance(value, int) else f"{key} {value}"
        for key, value in facts.items()
    ]
    emit(facts, as_json, [*said, f"next: the commands in {folder / 'README.md'}"])


def sources_of(data: Path) -> dict[str, int]:
    """Return bytes of text by source: the subfolders that hold any, or all of it as one.

    Raises:
        InputError: there is no file of text.
    """
    files = [data] if data.is_file() else sorted(one for one in data.rglob("*") if one.is_file())
    sizes = dict[str, int]()
    for file in files:
        if match := READ.search(file.name):
            inside = file.relative_to(data).parts
            source = inside[0] if len(inside) > 1 else ""
            text = file.stat().st_size * (PACKED if match[2] or match[1] == "parquet" else 1)
            sizes[source] = sizes.get(source, 0) + text
    if not sum(sizes.values()):
        raise InputError(
            "no text here", where=str(data), fix="give a folder of .jsonl, .parquet or .txt files"
        )
    return sizes if "" not in sizes else {data.stem: sum(sizes.values())}


def mix_yaml(made: Plan, sources: list[str]) -> str:
    """Return mix.yaml."""
    epochs = ", ".join(f"{one}: {made.epochs:g}" for one in sources)
    return (
        f"""\
{modeline(MIXTURE)}
version: 1
seed: 1
sequence_length: {made.row}  # at most what the shape was made for, a 1000th of the text
packing: best_fit  # no document that fits a row is cut
sources:
"""
        + "".join(f"  {one}: {{data: ./tokens/{one}}}\n" for one in sources)
        + f"""\
stages:
  # {made.trained / 1e6:,.1f}M tokens, about: 20 for each parameter (Hoffmann et al., 2022); each
  # text four times at most (Muennighoff et al., 2023). For other shares: tokens and weights.
  - {{name: main, epochs: {{{epochs}}}}}
"""
    )


def train_yaml(made: Plan, sources: list[str]) -> str:
    """Return train.yaml."""
    why = "the largest for which the text is enough" if made.chosen else "as asked for"
    held = ", ".join(f"{one}: tokens/{one}/validation" for one in sources)
    module = made.recipe.values()["train_module"] if made.recipe else {}
    extra = "".join(
        f"  {part}: {flow(module[part])}  # what fits {made.recipe.gpu.name}: olm-train presets\n"
        for part in ("dp_config", "ac_config", "loss")
        if made.recipe and part in module
    )
    return f"""\
{modeline(TRAINING)}
seed: 1
model: {{preset: {made.preset}}}  # {made.model.num_params / 1e6:,.1f}M parameters: {why}
data_loader:
  mixture: mix.lock.json
  global_batch_size: {made.batch}  # tokens: 0.58 D^0.571 (Step Law, arXiv 2503.04715)
train_module:
  rank_microbatch_size: {made.microbatch}  # tokens: what fits a rank, or all of the step
  # rate: 0.00235 (N / 108M)^(-1/3), at most 0.003 (OLMo-core's ladder); 0.99 below half a million
  # tokens a step. Published laws disagree: try half and twice of it on a short run.
  optim: {{name: adamw, lr: {made.lr:.1e}, betas: [0.9, {made.beta2}], weight_decay: 0.1}}
  # constant, then down to zero: before it falls, the run can be gone on with
  scheduler: {{name: wsd, warmup_fraction: 0.05, decay_fraction: 0.2}}
  max_grad_norm: 1.0
{extra}trainer:
  save_folder: runs/main
  callbacks:
    checkpointer: {{save_interval: 250}}  # steps that a failure costs at most
    lm_evaluator:
      eval_interval: 100
      eval_on_finish: true
      datasets: {{{held}}}
"""


def flow(value: JsonObject) -> str:
    """Return a mapping as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=1000).strip()


def readme(made: Plan, name: str, places: dict[str, str]) -> str:
    """Return README.md."""
    ranks, inputs = made.recipe.gpus if made.recipe else 1, " ".join(places.values())
    run = f"torchrun --nproc-per-node={min(ranks, 8)} -m olm_train.run train.yaml"
    tokenize = "".join(
        f"olm-data tokenize {place} --tokenizer tokenizer.json --output tokens/{one} "
        f"--holdout {made.holdout:g}\n"
        for one, place in places.items()
    )
    return f"""\
# {name}

{made.tokens:,} tokens, if {made.bytes_a_token} bytes are one; gone through {made.epochs:g} times
by a model of {made.model.num_params:,} parameters, {made.preset}. In this folder:

```bash
olm-data train-tokenizer {inputs} --vocab-size {made.vocab_size} --output tokenizer.json
{tokenize}olm-data mix mix.yaml
{run} --dry-run  # memory and time
{run}
olm-train generate runs/main --prompt "..."
```

Each may be run again after an interruption. Reasons stand beside the values in `mix.yaml` and
`train.yaml`; `olm-data stats tokens/NAME` counts the tokens.
"""
