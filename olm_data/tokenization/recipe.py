"""The recipe of a dataset: every option of tokenising, in one place.

    recipe.yaml | olm-data tokenize [recipe.yaml] --field value | olm_data.tokenize(field=value)
        --read_recipe--> Recipe --request.prepare--> Request -> plan

A field has one name: in the file, as a flag (`--text-column`), as an argument in Python; a flag
replaces what the file says. Light to import: the command line is made of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from olm_data.config.convert import parse
from olm_data.config.hints import Count, Needs, ReadBy
from olm_data.config.values import Values
from olm_data.counts import parse_share
from olm_data.dataset.inputs import Container, SourceRequest, SpecialPolicy
from olm_data.errors import UsageError
from olm_data.path_kinds import kind_of
from olm_data.storage.objects import Options, use_options

FieldValue = str | float | Fraction | Sequence[str] | None
"""What may stand for a field: as a command line, a YAML file or a script in Python has it."""


@dataclass(frozen=True)
class BadBudget:
    """How many bad records a run accepts: a share of all records, or a count."""

    share: Fraction | None
    count: int

    def allows(self, bad: int, records: int) -> bool:
        """Whether `bad` of `records` is within the budget."""
        return bad <= (self.count if self.share is None else self.share * records)

    def __str__(self) -> str:
        return f"{self.count}" if self.share is None else f"{float(self.share * 100):g}%"


def parse_budget(text: str) -> BadBudget:
    """Return the budget that `0.1%` (a share) or `25` (a count) spells.

    Raises:
        UsageError: it is neither.
    """
    if text.endswith("%"):
        return BadBudget(parse_share(text, "--max-bad", allow_one=True), 0)
    if re.fullmatch(r"[0-9]{1,30}", text):
        return BadBudget(None, int(text))
    raise UsageError(
        f"--max-bad {text!r} is neither a count nor a percentage", fix="write 25 or 0.1%"
    )


def _budget(value: object) -> str:
    parse_budget(str(value))
    return str(value)


def _options(value: object) -> Options:
    if not isinstance(value, Mapping):
        raise UsageError("storage_options is no mapping", fix="write {profile: lab}")
    return value


def _share(option: str, value: object) -> Fraction:
    return parse_share(str(value), option)


_SHARE: dict[str, Any] = {"type": ["number", "string"]}
Holdout = Annotated[Fraction, ReadBy(partial(_share, "--holdout"), "a share", _SHARE)]
Sample = Annotated[Fraction, ReadBy(partial(_share, "--sample"), "a share", _SHARE)]
OfStorage = Annotated[Options, ReadBy(_options, "a mapping", {"type": "object"})]
Budget = Annotated[str, ReadBy(_budget, "a share or a count", {"type": ["integer", "string"]})]


OF_CHAT = Needs("format", value="chat")


class Recipe(SourceRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to tokenise, and how.

    Attributes:
        tokenizer: tokenizer.json, a folder with one, or a hub id.
        output: Folder or s3://bucket/prefix of the dataset.
        like: Take the documents of this dataset, in its order, for another tokenizer.
        exclude_ids: Leave out the records whose ids are in this file.
        sample: Draw this share of the documents, by their text: 1%.
        seed: Seed of the sample and the shuffle.  [default: 0]
        limit: Stop after this many documents: 100K.
        dedup: Keep only the first document of each text, or of texts that are nearly the same.
        minhash: Bands and rows of the signatures of near-duplicates.
        decontaminate: Drop what shares words in a row with these: text and JSONL files, eval sets.
            May be repeated.
        decontaminate_ngram: How many words in a row.
        eos: Token after each document, or none.
        bos: Token before each document.
        special: Text that spells a special token: ordinary text, the token itself, or an error.
        holdout: Share of documents held out.
        shard_tokens: Approximate tokens per shard: 100M.  [default: to fit the inputs]
        container: Tokens with a NumPy header, or without: for other programs.
        shuffle_documents: Shuffle the documents of each shard.
        max_bad: Bad records accepted: a share or a count.
        allow_duplicates: Take inputs with the same content.
        strict_inputs: Refuse inputs among which a file would not be read.
        single_writer: State that no other process writes there: for stores without conditional
            writes.
        encoder: auto, hf, gigatoken, or module:Class.
        chat_template: tokenizer (its own), chatml, tulu, or a file.  [default: tokenizer]
        train: Whose words are trained: assistant, last, all, or roles: a,b.  [default: assistant]
        train_thinking: Train thoughts in answers, or mask them.  [default: keep]
        train_ends: Which ends of turns are trained: all, of trained turns, the last, none.
            [default: turn]
        max_tokens: Drop or cut longer conversations: 4096.
        too_long: What becomes of them: dropped, or cut on one side.  [default: drop]
        runner: Where tasks run: processes here, a Slurm job array, a Ray cluster.
        workers: Tasks at a time.  [default: all CPUs]
        slurm: An option of sbatch: time=4:00:00. May be repeated.
        ray_address: A Ray cluster.  [default: RAY_ADDRESS, or one made here]
        storage_options: For the clients of buckets, as fsspec takes them; by URL, where they
            differ. Recorded nowhere.
    """

    # which records become documents
    like: str | None = None
    exclude_ids: str | None = None
    sample: Sample | None = None
    seed: Annotated[int | None, Needs("sample", "shuffle_documents")] = None
    limit: Count | None = None
    dedup: Literal["exact", "minhash"] | None = None
    minhash: Annotated[str, Needs("dedup", value="minhash")] = "14x8"
    decontaminate: tuple[str, ...] = ()
    decontaminate_ngram: Annotated[int, Meta(ge=2, le=1000), Needs("decontaminate")] = 13
    # how they become tokens
    tokenizer: str | None = None
    eos: str = "auto"
    bos: str = "none"
    special: SpecialPolicy = "plain"
    encoder: str = "auto"
    # of chats: how they become text, and what is trained
    chat_template: Annotated[str | None, OF_CHAT] = None
    train: Annotated[str | None, OF_CHAT] = None
    train_thinking: Annotated[Literal["keep", "mask"] | None, OF_CHAT] = None
    train_ends: Annotated[Literal["all", "turn", "last", "none"] | None, OF_CHAT] = None
    max_tokens: Annotated[Count | None, OF_CHAT] = None
    too_long: Annotated[Literal["drop", "left", "right"] | None, Needs("max_tokens")] = None
    # what is written
    output: str | None = None
    holdout: Holdout = Fraction(0)
    shard_tokens: Count | None = None
    container: Container = "npy"
    shuffle_documents: bool = False
    # what is accepted, and where tasks run
    max_bad: Budget = "0.1%"
    allow_duplicates: bool = False
    strict_inputs: bool = False
    single_writer: bool = False
    runner: Literal["local", "slurm", "ray"] = "local"
    workers: Annotated[int, Meta(ge=1)] | None = None
    slurm: Annotated[tuple[str, ...], Needs("runner", value="slurm")] = ()
    ray_address: Annotated[str | None, Needs("runner", value="ray")] = None
    storage_options: OfStorage | None = None

    @property
    def budget(self) -> BadBudget:
        """How many bad records are accepted."""
        return parse_budget(self.max_bad)

    @property
    def shuffle(self) -> int | None:
        """Seed of the order of the documents in each shard, or None for input order."""
        return (self.seed or 0) if self.shuffle_documents else None


def is_recipe(word: str) -> bool:
    """Whether an argument of `olm-data tokenize` names a recipe, and not text."""
    yaml = word.endswith((".yaml", ".yml")) and "://" not in word
    return yaml and kind_of(word) in (None, "file")


def read_recipe(
    words: Sequence[str],
    given: Mapping[str, FieldValue],
    *,
    name_of: Callable[[str], str] = lambda name: "--" + name.replace("_", "-"),
) -> Recipe:
    """Return the recipe that arguments spell; its storage options are in use from now on.

    Args:
        words: inputs; or a recipe's file, and inputs in the place of its own.
        given: fields, in the place of the file's own.
        name_of: what messages call a given field.

    Raises:
        UsageError: a field that there is not, or a value that it does not take: says where.
    """
    if words and is_recipe(words[0]):
        values = Values.read(words[0], example="recipe.yaml", numbers="exact")
        _count_from(values.folder, values.data)
        words = words[1:]
    else:
        values = Values({}, file="the command line", numbers="exact")
    if words:
        values.give(("inputs",), list(words), "INPUT")
    for name, value in given.items():
        values.give((name,), value, name_of(name))
    recipe = parse(Recipe, values)
    if recipe.storage_options:
        use_options(recipe.storage_options, instead="storage_options" in given)
    return msgspec.structs.replace(recipe, storage_options=None)


def _count_from(folder: os.PathLike[str], data: dict[str, Any]) -> None:
    """Let relative paths in a recipe count from its folder, in place."""

    def below(name: str, path: Any) -> Any:
        if not isinstance(path, str) or "://" in path or path in ("", "-"):
            return path
        place = os.path.normpath(os.path.join(folder, os.path.expanduser(path)))
        # a hub id is no path, unless a file of that name is there
        hub = name in ("tokenizer", "chat_template") and not path.startswith((".", "/", "~"))
        return path if hub and not os.path.exists(place) else place

    for name in ("root", "like", "exclude_ids", "tokenizer", "output", "chat_template"):
        if name in data:
            data[name] = below(name, data[name])
    for name in ("inputs", "decontaminate"):
        if isinstance(data.get(name), list):
            data[name] = [below(name, item) for item in data[name]]
