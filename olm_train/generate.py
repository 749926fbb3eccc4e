"""Text from a checkpoint: prompt in, sampled continuation out.

    SAVE_FOLDER/step... or an export -> verified -> weights, tokenizer
                                                    prompt -> ids -> sample -> text

Every token recomputes the whole context: right for looking at a model, not for serving one.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from olm_data.command import reported
from olm_data.errors import UsageError, ValidationError, shown
from olm_data.extras import needs
from olm_data.storage.names import is_unicode
from olm_data.storage.store import Store

with needs("generating text"):
    import torch

    from olm_train.checkpoint.portable import open_portable
    from olm_train.model.decoder import Decoder


@torch.no_grad()
def sample(
    model: Decoder,
    prompt: list[int],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    context: int,
    eos: int | None,
) -> list[int]:
    """Return new token ids after `prompt`, without the end-of-document token.

    Args:
        model: gives logits [1, n, V] for ids [1, n].
        prompt: at least one id.
        max_new_tokens: stop after so many.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: only the k most likely tokens; 0: all.
        seed: of the random numbers.
        context: at most so many of the last ids are looked at.
        eos: id that ends the text, None: nothing does.

    Raises:
        ValidationError: a logit is NaN or infinite.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(max_new_tokens):
        logits = model(torch.tensor([ids[-context:]]))[0, -1].float()  # [V]
        if not logits.isfinite().all():
            raise ValidationError(
                "the model gives non-finite logits",
                why="its weights are too large, or non-finite themselves",
                fix="choose an earlier checkpoint with --checkpoint",
            )
        if temperature == 0:
            token = int(logits.argmax())
        else:
            if 0 < top_k < logits.numel():
                logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
            weights = torch.softmax(logits / temperature, dim=-1)
            token = int(torch.multinomial(weights, 1, generator=generator))
        if token == eos:
            break
        ids.append(token)
    return ids[len(prompt) :]


def generate(
    save_folder: str,
    prompt: str,
    *,
    checkpoint: str = "latest",
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> dict[str, Any]:
    """Continue `prompt` with the model of a run, a checkpoint or an export.

    Returns:
        `prompt`, `text`, `ids` and what they were made with.

    Raises:
        InputError: there is no checkpoint.
        UsageError: the prompt is empty and the model knows no token that begins a document, or it
            is no text; the temperature is no number.
        ValidationError: the checkpoint is damaged.
    """
    if not 0 <= temperature < math.inf:  # NaN is neither
        raise UsageError(f"--temperature is a number from 0 on, not {temperature}")
    if not is_unicode(prompt):
        raise UsageError("the prompt is not valid UTF-8", fix="in the C locale, set LANG=C.UTF-8")
    found = open_portable(
        save_folder, checkpoint, lambda error: click.echo(shown(f"warning: {error}"), err=True)
    )
    tokenizer, lock = found.tokenizer(), found.lock
    first, last = lock.tokenizer.bos, lock.tokenizer.eos
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    start = first if first is not None else last
    if first is not None or not ids:
        if start is None:
            raise UsageError("the prompt has no token", fix="give a --prompt with some text")
        ids = [start, *ids]
    model = found.model()
    if max(ids) >= model.config.vocab_size:
        raise ValidationError(
            f"the tokenizer gives the id {max(ids):,}, and the model knows only "
            f"{model.config.vocab_size:,}",
            where=found.folder,
        )
    new = sample(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        context=lock.sequence_length,
        eos=last,
    )
    return {
        "prompt": prompt,
        "text": tokenizer.decode(new, skip_special_tokens=False),
        "ids": new,
        "checkpoint": found.name,
        "temperature": temperature,
        "top_k": top_k,
        "seed": seed,
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("save_folder")
@click.option("--checkpoint", default="latest", show_default=True, help="A step or folder name.")
@click.option("--prompt", default="", help="Text to continue; empty: a new document.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=100, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.8, show_default=True)
@click.option("--top-k", type=click.IntRange(0), default=50, show_default=True, help="0: all.")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Also write a JSON file.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(save_folder: str, output: Path | None, debug: bool, **options: Any) -> None:
    """Sample text from a run's newest checkpoint, from a checkpoint, or from an exported model.

    \b
    olm-train generate runs/first --prompt "def " --max-new-tokens 50
    """
    with reported(debug=debug):
        result = generate(save_folder, **options)
        if output is not None:
            Store(str(output.parent)).put(
                output.name, json.dumps(result, indent=1).encode() + b"\n"
            )
    click.echo(shown(result["prompt"] + result["text"]))
