"""The command that writes a folder to train in: `olm-train new mine --data ./text`.

files under --data -> sources and bytes -> Plan -> NAME/README.md, mix.yaml, train.yaml
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
import yaml

from olm_data.bounded_json import JsonObject
from olm_data.command import Command, say
from olm_data.config.schema import modeline
from olm_data.counts import counted
from olm_data.errors import ConflictError, InputError, UsageError, suggest
from olm_data.extras import needs
from olm_data.mixture.manifest import SCHEMA as MIXTURE
from olm_data.printing import emit
from olm_data.sources.formats import KNOWN, TEXT_PER_COMPRESSED_BYTE, codec_of, format_of

with needs("planning a model"):
    from olm_train.estimate.gpus import gpu_named
    from olm_train.extensions.new.plan import ENOUGH, RunPlan, plan
    from olm_train.model.presets import PRESETS
    from olm_train.run.command import SCHEMA as TRAINING

ALSO = {"gpt2-124m": "gpt2-small", "gpt2-355m": "gpt2-medium"}
"""Other names of presets that people type."""


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
    found = look(Path(data))
    made = plan(found.size, shape, gpu_named(gpu) if gpu else None)
    places = {one: os.path.relpath(place, folder) for one, (place, _) in found.sources.items()}
    files = {
        "mix.yaml": mix_yaml(made, list(places)),
        "train.yaml": train_yaml(made, list(places)),
        "README.md": readme(made, folder.name, places),
    }
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(text)
    said = WrittenFolder(
        folder=name,
        preset=made.preset,
        bytes=found.size,
        files_of_no_format=found.others,
        tokens=made.tokens,
        epochs=made.epochs,
        parameters=made.model.num_params,
    )
    emit(said, as_json)
    say(f"next: the commands in {folder / 'README.md'}")


class WrittenFolder(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided.

    Attributes:
        bytes: of text, of compressed files about.
        files_of_no_format: files there that `olm-data tokenize` does not read by their names.
        tokens: of the text, estimated.
    """

    folder: str
    preset: str
    bytes: int
    files_of_no_format: int
    tokens: int
    epochs: float
    parameters: int


class Text(NamedTuple):
    """What lies in a folder: place and bytes of each source, and how many files are no text."""

    sources: dict[str, tuple[Path, int]]
    others: int

    @property
    def size(self) -> int:
        """Bytes of text."""
        return sum(size for _, size in self.sources.values())


def look(data: Path) -> Text:
    """Return what is there: a source for each subfolder that holds text, or all of it as one.

    Raises:
        InputError: there is no file of text.
    """
    files = [data] if data.is_file() else sorted(one for one in data.rglob("*") if one.is_file())
    sizes, others = dict[Path, int](), 0
    for file in files:
        kind, inside = format_of(file.name), file.relative_to(data).parts
        if kind is None:
            others += 1
            continue
        packed = kind == "parquet" or codec_of(file.name) is not None
        text = file.stat().st_size * (TEXT_PER_COMPRESSED_BYTE if packed else 1)
        place = data / inside[0] if len(inside) > 1 else data
        sizes[place] = sizes.get(place, 0) + text
    if not sum(sizes.values()):
        raise InputError(
            "no text here",
            where=str(data),
            why=f"{counted(others, 'file')} of no known format" if others else None,
            fix=f"give a folder of files that end in {KNOWN}",
        )
    sources = {_source(place): (place, size) for place, size in sizes.items()}
    if data in sizes or len(sources) < len(sizes):
        sources = {_source(data): (data, sum(sizes.values()))}
    return Text(sources, others)


def _source(place: Path) -> str:
    """Return the name of a folder or file as a manifest takes it for a source."""
    return re.sub(r"[^A-Za-z0-9]+", "-", place.resolve().stem).strip("-")[:64] or "text"


def mix_yaml(made: RunPlan, sources: list[str]) -> str:
    """Return mix.yaml."""
    epochs = ", ".join(f"{one}: {made.epochs:g}" for one in sources)
    tokens = f"{made.trained / 1e6:,.1f}M tokens, about: {made.share:.2g} for each parameter"
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
  # {tokens}, {ENOUGH} are enough
  # (Hoffmann et al., 2022); each text four times at most (Muennighoff et al., 2023). For other
  # shares: tokens and weights.
  - {{name: main, epochs: {{{epochs}}}}}
"""
    )


def train_yaml(made: RunPlan, sources: list[str]) -> str:
    """Return train.yaml."""
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
model: {{preset: {made.preset}}}  # {made.model.num_params / 1e6:,.1f}M parameters: {made.why}
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


def readme(made: RunPlan, name: str, places: dict[str, str]) -> str:
    """Return README.md."""
    ranks, inputs = made.recipe.gpus if made.recipe else 1, shlex.join(places.values())
    run = f"torchrun --nproc-per-node={min(ranks, 8)} -m olm_train.run train.yaml"
    tokenize = "".join(
        f"olm-data tokenize {shlex.quote(place)} --tokenizer tokenizer.json --output tokens/{one} "
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
