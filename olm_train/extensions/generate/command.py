"""The command that continues texts: prompts in, sampled continuations out.

    run, checkpoint, export, what model.save wrote, model of transformers -> LoadedModel
    prompts, dealt over the ranks of torchrun -> Engine -> texts, in the order of the prompts

In fp32, on a CUDA device if there is one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import click
import msgspec

from olm_data.bounded_json import MalformedJson, decode
from olm_data.command import Command, CountParam
from olm_data.counts import MAX_COUNT
from olm_data.errors import InputError, UsageError, ValidationError, shown
from olm_data.extras import needs
from olm_data.path_kinds import nearest
from olm_data.regular_files import MAX_WHOLE, read_regular
from olm_data.run_log.run_folder import Sample
from olm_data.storage.names import is_unicode
from olm_data.storage.output_paths import refuse_output
from olm_data.storage.store import Store

with needs("generating text"):
    from olm_train.checkpoint.model_format import pinned
    from olm_train.distributed.world import World, quiet_alone
    from olm_train.extensions.generate.engine import MAX_ROWS, Generation, TextRequest
    from olm_train.extensions.generate.loaded import LoadedModel
    from olm_train.extensions.generate.sampling import MAX_SEED, Sampling


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the file of prompts; a seed of its own goes before `--seed`."""

    prompt: str
    seed: int | None = None


def generate(
    model: str,
    prompts: Sequence[str | Prompt],
    *,
    checkpoint: str = "latest",
    max_new_tokens: int = 100,
    sampling: Sampling = Sampling(temperature=0.8, top_k=50),  # noqa: B008  # it is frozen
    samples: int = 1,
    stop: Sequence[str] = (),
    batch: int = MAX_ROWS,
    trust: bool = False,
    world: World | None = None,
) -> list[Sample]:
    """Continue prompts with the model of a run, a checkpoint, an export, or one of transformers.

    Args:
        model: its place, see `open_portable`.
        prompts: texts; an empty one begins a document.
        checkpoint: of a run the step or folder name of a checkpoint, or `latest`.
        max_new_tokens: a text ends after so many, or where the model can look at no more.
        sampling: how tokens are chosen.
        samples: texts of each prompt: with its seed, the seed after it, and so on.
        stop: a text ends before any of these strings.
        batch: texts at a time.
        trust: import the classes of a saved model by the path that it gives, see `load_model`.
        world: ranks that share the prompts; None: this process alone. Every rank calls it.

    Returns:
        A sample of each, on every rank, in the order of the prompts.

    Raises:
        InputError: there is no checkpoint.
        UsageError: a prompt is empty and the model knows no token that begins a document, or it
            is no text, or too long.
        ValidationError: the checkpoint is damaged, or gives logits that are no numbers.
    """
    given = [Prompt(each) if isinstance(each, str) else each for each in prompts]
    if not all(is_unicode(each.prompt) for each in given):  # before a model is looked for
        raise UsageError("the prompt is not valid UTF-8", fix="in the C locale, set LANG=C.UTF-8")
    world = world or World()
    wanted = []
    for each in given:
        first = sampling.seed if each.seed is None else each.seed
        wanted += [
            (each.prompt, replace(sampling, seed=first).after(number)) for number in range(samples)
        ]
    own = wanted[world.rank :: world.size]
    place = world.on_main(lambda: pinned(model))  # the same commit of the hub on every rank

    def write() -> list[Sample]:
        loaded = LoadedModel.open(place, checkpoint, device=world.device, trust=trust)
        writings = loaded.engine(batch).run(
            TextRequest(
                prompt=loaded.ids_of(prompt),
                sampling=wish,
                max_new_tokens=max_new_tokens,
                stop=tuple(stop),
            )
            for prompt, wish in own
        )
        return [
            sample_of(prompt, writing, loaded.found.name)
            for (prompt, _), writing in zip(own, writings, strict=True)
        ]

    parts = world.on_each(write)
    return [parts[number % world.size][number // world.size] for number in range(len(wanted))]


def checked(writing: Generation) -> Generation:
    """Return a text that has ended.

    Raises:
        ValidationError: the model's logits were no numbers.
    """
    if writing.finish == "non-finite":
        raise ValidationError(
            "the model gives non-finite logits",
            why="its weights are too large, or non-finite themselves",
            fix="choose an earlier checkpoint with --checkpoint",
        )
    return writing


def sample_of(prompt: str, writing: Generation, checkpoint: str) -> Sample:
    """Return what is kept of a text.

    Raises:
        ValidationError: the model's logits were no numbers.
    """
    checked(writing)
    return Sample(
        **asdict(writing.request.sampling),
        prompt=prompt,
        text=writing.text,
        ids=tuple(writing.ids),
        checkpoint=checkpoint,
        stop=writing.request.stop,
        finish="stop" if writing.finish == "stop" else "length",
    )


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file: a JSON object a line.

    Raises:
        InputError: there is no such file, or none in it, or a line is another thing.
    """
    try:
        data = read_regular(path, MAX_WHOLE)
    except FileNotFoundError as error:
        raise InputError(
            "there is no such file of prompts", where=str(path), fix=nearest(path, "check the path")
        ) from error
    found = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            found.append(decode(line, Prompt))
        except MalformedJson as error:
            raise InputError(
                f"line {number} is no prompt: {error}",
                where=str(path),
                fix='write a JSON object on each line: {"prompt": "def "}',
            ) from None
    if not found:
        raise InputError("there is no prompt in the file", where=str(path))
    return found


def sampling_options(command: Any) -> Any:
    """Add the options of `Sampling` to a command."""
    for add in (
        click.option(
            "--seed", type=CountParam(0, MAX_SEED), default=0, show_default=True
        ),
        click.option(
            "--repetition-penalty", type=click.FloatRange(0), default=1.0, show_default=True,
            help="Divides the logits of tokens that were there already; 1: not.",
        ),
        click.option(
            "--min-p", type=click.FloatRange(0, 1), default=0.0, show_default=True,
            help="Only tokens at least so likely beside the most likely one.",
        ),
        click.option(
            "--top-p", type=click.FloatRange(0, 1), default=1.0, show_default=True,
            help="Only the most likely tokens that make so much together.",
        ),
        click.option(
            "--top-k", type=CountParam(0), default=50, show_default=True, help="0: all."
        ),
        click.option(
            "--temperature", type=click.FloatRange(0), default=0.8, show_default=True,
            help="0: the most likely token.",
        ),
    ):  # fmt: skip
        command = add(command)
    return command


def sampling_of(options: Mapping[str, float]) -> Sampling:
    """Return what the options added by `sampling_options` say.

    Raises:
        UsageError: a number is out of range.
    """
    wishes: dict[str, Any] = {field.name: options[field.name] for field in fields(Sampling)}
    return Sampling(**wishes)


@click.command(cls=Command)
@click.argument("model")
@click.option("--checkpoint", default="latest", show_default=True, help="A step or folder name.")
@click.option("--prompt", help="Text to continue; empty: a new document.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help='Many texts: a file of lines {"prompt": "..."}; prints a JSON object for each.',
)
@click.option(
    "--samples", type=CountParam(1), default=1, show_default=True, help="Texts of each prompt."
)
@click.option("--max-new-tokens", type=CountParam(1), default=100, show_default=True)
@sampling_options
@click.option("--stop", multiple=True, help="A text ends before this; more than one may be given.")
@click.option(
    "--batch",
    type=CountParam(1),
    default=MAX_ROWS,
    show_default=True,
    help="Texts at a time.",
)
@click.option("--trust", is_flag=True, help="Import classes that a saved model names: I trust it.")
@click.option("--output", help="Also write a JSON file.")
def main(
    model: str,
    prompt: str | None,
    prompts: Path | None,
    output: str | None,
    **options: Any,
) -> None:
    """Sample text from a model: of a run's newest checkpoint, a checkpoint, an exported or saved
    model, or a model of transformers.

    \b
    olm-train generate runs/first --prompt "def " --max-new-tokens 50
    olm-train generate hf://ORG/NAME --prompt "def "
    olm-train generate runs/first --prompts prompts.jsonl --output texts.jsonl
    torchrun --nproc-per-node=8 -m olm_train.generate runs/first --prompts prompts.jsonl

    For trying a model out. To serve one, export it and take a server made for that.
    """
    if prompt is not None and prompts is not None:
        raise UsageError("--prompt and --prompts exclude each other", fix="leave one out")
    if output is not None:
        refuse_output(output, "--output", "local file")
    sampling = sampling_of(options)
    others = {name: value for name, value in options.items() if not hasattr(sampling, name)}
    texts = [Prompt(prompt or "")] if prompts is None else read_prompts(prompts)
    world = World.start()
    quiet_alone(world)
    try:
        results = generate(model, texts, sampling=sampling, world=world, **others)
    finally:
        world.stop()
    if not world.main:
        return
    lines = prompts is not None or len(results) > 1
    if output is not None:
        data = b"".join(map(Sample.line, results)) if lines else results[0].encode()
        Store(os.path.dirname(output) or ".").put(os.path.basename(output), data, limit=MAX_COUNT)
    for result in results:
        if prompts is None:
            click.echo(shown(result.prompt + result.text))
        elif output is None:
            click.echo(result.line(), nl=False)
