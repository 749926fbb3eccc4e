"""Text from a checkpoint: prompt in, sampled continuation out.

    SAVE_FOLDER/step... -> verified -> weights; its lock -> tokenizer
                                       prompt -> ids -> sample -> text

Every token recomputes the whole context: right for looking at a model, not for serving one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import click
import torch

from olm_data.errors import InputError, OlmError, UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.storage.store import Store
from olm_train.checkpoint.load import Checkpoint, find_checkpoint, open_checkpoint
from olm_train.checkpoint.manifest import LOCK, MANIFEST, folder_name
from olm_train.checkpoint.weights import load_model
from olm_train.model.decoder import Decoder
from olm_train.world import World


def load_tokenizer(checkpoint: Checkpoint) -> tuple[Any, Lock]:
    """Return the tokenizer of the data a checkpoint was trained on, and its lock.

    Raises:
        InputError: the data is no longer where it was.
        ValidationError: another tokenizer lies there now.
    """
    from tokenizers import Tokenizer

    text = checkpoint.read_bytes(LOCK) or b""
    lock = Lock.decode(text, f"{checkpoint.state()['lock_folder']}/{LOCK}")
    folder = lock.location(lock.sources[0].name)
    try:
        data = Store(folder).read("tokenizer.json")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(
            "the data set of the run is gone, and its tokenizer with it",
            where=folder,
            fix="put the data back where the run found it",
        ) from error
    if hashlib.sha256(data).hexdigest() != lock.tokenizer.sha256:
        raise ValidationError(
            "the tokenizer is not the one this checkpoint was trained with",
            where=f"{folder}/tokenizer.json",
            why="the ids would mean other text",
        )
    tokenizer = Tokenizer.from_str(data.decode())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, lock


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
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(max_new_tokens):
        logits = model(torch.tensor([ids[-context:]]))[0, -1].float()  # [V]
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
    """Continue `prompt` with a run's model: `prompt`, `text`, `ids` and what they were made with.

    Raises:
        InputError: there is no checkpoint.
        UsageError: the prompt is empty and the model knows no token that begins a document.
        ValidationError: the checkpoint is damaged, or the data moved.
    """
    found = _find(save_folder, checkpoint)
    tokenizer, lock = load_tokenizer(found)
    first, last = lock.tokenizer.bos, lock.tokenizer.eos
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    start = first if first is not None else last
    if first is not None or not ids:
        if start is None:
            raise UsageError("the prompt has no token", fix="give a --prompt with some text")
        ids = [start, *ids]
    new = sample(
        load_model(found),
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


def _find(save_folder: str, name: str) -> Checkpoint:
    if name == "latest":
        return find_checkpoint(save_folder, World(), lambda error: click.echo(error, err=True))
    place = f"{save_folder}/{folder_name(int(name)) if name.isdigit() else name}"
    if not Store(place).exists(MANIFEST):
        raise InputError(
            f"there is no checkpoint {name}",
            where=save_folder,
            fix="give a step, a folder name such as step00000100, or latest",
        )
    return open_checkpoint(place, World())


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("save_folder")
@click.option("--checkpoint", default="latest", show_default=True, help="A step or folder name.")
@click.option("--prompt", default="", help="Text to continue; empty: a new document.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=100, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.8, show_default=True)
@click.option("--top-k", type=click.IntRange(0), default=50, show_default=True, help="0: all.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Also write a JSON file.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(save_folder: str, output: Path | None, debug: bool, **options: Any) -> None:
    """Sample text from a run's newest checkpoint.

    \b
    python -m olm_train.generate runs/first --prompt "def " --max-new-tokens 50
    """
    try:
        result = generate(save_folder, **options)
        if output is not None:
            Store(str(output.parent)).put(
                output.name, json.dumps(result, indent=1).encode() + b"\n"
            )
    except OlmError as error:
        if debug:
            raise
        click.echo(f"error: {error}", err=True)
        raise SystemExit(error.exit_code) from None
    click.echo(result["prompt"] + result["text"])


if __name__ == "__main__":
    main()
