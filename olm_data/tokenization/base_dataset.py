"""What `olm-data add` goes on top of: a dataset opened for additions, as values.

dataset -> BaseDataset -> complete    a recipe: all that changes bytes is as in the dataset
                -> select      the records of a source, as the dataset's were selected
                -> refuse_known, named_apart: inputs that are there already, or named as one is
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

import msgspec

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.inputs import InputFile, OwnFilter, PositionKind, SpecialPolicy
from olm_data.dataset.job import JobFile
from olm_data.dataset.manifest import InputInfo, Manifest, read_manifest
from olm_data.dataset.options import Options
from olm_data.dataset.plan import Plan, read_plans
from olm_data.dataset.tokenizer import TOKENIZER, TokenizerInfo, own_tokenizer
from olm_data.errors import InputError, UsageError, ValidationError, printable
from olm_data.sources.base import SourcePlan
from olm_data.sources.readers import CHAT
from olm_data.storage.store import Store
from olm_data.tokenization.recipe import Recipe
from olm_data.tokenization.select_documents import stored_ids
from olm_data.tokenizer.tokenizer import TokenizerSpec


@dataclass(frozen=True, kw_only=True)
class BaseDataset:
    """The dataset that new inputs are added to.

    Attributes:
        store: its folder.
        manifest, options: of its newest version, and how it was made.
        plans: of all its versions, in order.
        tokenizer: the one that made it.
        read_from: its inputs by path, with the place they were read from, as far as job.json tells.
        version: the version, from 0, that the new inputs go on top of.
    """

    store: Store
    manifest: Manifest
    options: Options
    plans: Sequence[Plan]
    tokenizer: TokenizerSpec
    read_from: Mapping[str, InputFile]
    version: int

    @classmethod
    def open(cls, path: str, *, single_writer: bool = False) -> BaseDataset:
        """Open the newest version of the dataset at a local path or URL.

        Args:
            single_writer: nobody else writes there; see `Store`.

        Raises:
            InputError: there is no finished dataset, or it is a validation split.
            ValidationError: its manifest, a plan or its tokenizer is missing or damaged.
        """
        store = Store(path, single_writer=single_writer)
        manifest = read_manifest(store)
        if manifest.tokenized is None or manifest.split != "train":
            raise InputError(
                "nothing can be added to this dataset by itself",
                where=path,
                why="it is the validation split of another dataset, or was not made by tokenize",
                fix="add to the dataset it belongs to; documents are held out by the same rule",
            )
        plans = read_plans(store, manifest)
        return cls(
            store=store,
            manifest=manifest,
            options=manifest.tokenized,
            plans=plans,
            tokenizer=_tokenizer(store, manifest),
            read_from=_read_from(store),
            version=len(plans) - 1,
        )

    @property
    def before(self) -> BaseDataset | None:
        """The same, one version earlier; None before the first."""
        return replace(self, version=self.version - 1) if self.version else None

    @property
    def digest(self) -> str:
        """Digest of the version."""
        later = self.manifest.additions[self.version :]
        return later[0].parent if later else str(self.manifest.digest)

    @property
    def inputs(self) -> tuple[InputFile, ...]:
        """What the version was made from, so that new inputs are numbered after them; not read."""
        later = self.manifest.additions[self.version :]
        infos = self.manifest.inputs[: later[0].first_input] if later else self.manifest.inputs
        return tuple(self.read_from.get(item.path) or _known_input(item) for item in infos)

    @property
    def shards(self) -> int:
        """How many shard names the plans of the version have used."""
        last = self.plans[self.version]
        return last.first_shard + len(last.tasks)

    def complete(self, recipe: Recipe) -> Recipe:
        """Return a recipe with what it leaves open, and all that changes bytes, as it was here.

        The column of a named source is the source's own; a limit does not go on. A filter is
        imported only where the recipe names it, too.

        Raises:
            UsageError: the recipe names another filter, or none.
        """
        options = self.options
        require_filter(recipe, options.filter, self.store.root)
        if options.minhash is not None:
            raise UsageError(
                "nothing can be added to a dataset of --dedup minhash",
                where=self.store.root,
                why="the signatures of its documents are not kept, to compare new ones with",
                fix="tokenize all inputs together, into a new output",
            )
        text_column, id_column = recipe.text_column, recipe.id_column
        if recipe.source is None:
            there = {None: "none", "id": None}  # "id" is taken where there is one
            text_column = text_column or options.text_column
            id_column = id_column or there.get(options.id_column, options.id_column)
        seeded = options.sample is not None or options.shuffle_documents
        return msgspec.structs.replace(
            recipe,
            output=self.store.root,
            text_column=text_column,
            id_column=id_column,
            keep=tuple(f"{name}:{kind}" for name, kind in options.keep),
            where=options.condition,
            sample=None if options.sample is None else Fraction(options.sample),
            seed=options.seed if seeded else None,
            dedup=options.dedup,
            on_invalid=options.on_invalid,
            on_unknown=options.on_unknown,
            special=cast("SpecialPolicy", self.manifest.tokenizer.special),
            holdout=Fraction(options.holdout),
            container=self.manifest.container,
            shuffle_documents=options.shuffle_documents,
            format=recipe.format if options.chat is None else CHAT,
        )

    def select(self, source: SourcePlan) -> SourcePlan:
        """Return a source with the dataset's sample, ids to leave out and separator of texts.

        Raises:
            InputError: records without ids, where the dataset leaves out some by their ids.
            ValidationError: the ids that the dataset leaves out are damaged.
        """
        options = self.options
        texts = any(item.format == "txt" for item in source.inputs)
        ids = stored_ids(self.store, options.exclude)
        if ids is not None and source.options.id_column is None and not texts:
            raise InputError(
                "the new records have no ids, and the dataset was made with --exclude-ids",
                where=source.inputs[0].path,
                fix="say which column or field holds them: --id-column NAME",
            )
        selected = source.reading(
            separator=source.options.separator or (options.separator if texts else None),
            exclude=options.exclude,
            sample=options.sample,
            seed=options.seed,
            chat=options.chat,
        )
        return replace(selected, excluded=ids)

    def refuse_known(self, source: SourcePlan) -> None:
        """Refuse inputs that are in the dataset already, as far as can be told without reading.

        Raises:
            InputError: an input of the same name and size, of the same size and modification time
                or ETag, or at the same place, is in the dataset; names both.
        """
        sizes = {item.path: item.bytes for item in self.manifest.inputs}
        urls = {i.url: path for path, i in self.read_from.items() if i.url and path in sizes}
        revisions = {
            (item.bytes, item.revision): item.path
            for plan in self.plans
            for item in plan.inputs
            if item.bytes and item.revision
        }
        for item in source.inputs:
            known = item.path if sizes.get(item.path) == item.bytes else None
            known = known or urls.get(item.url) or revisions.get((item.bytes, item.revision))
            if known is not None:
                raise already_there(item.path, known)

    def named_apart(self, source: SourcePlan) -> SourcePlan:
        """Name each input whose name is taken here by more of the folders it lies in."""
        taken = {item.path for item in self.inputs}
        named = []
        for item in source.inputs:
            path = item.path
            if path in taken:
                parts = (item.url.partition("://")[2] or item.url).strip("/").split("/")
                own = path.count("/") + 1
                names = [posixpath.join(*parts[-n:]) for n in range(own + 1, len(parts) + 1)]
                free = (name for name in names if name not in taken)
                path = next(free, path)  # a plan with a name twice is refused
            taken.add(path)
            named.append(msgspec.structs.replace(item, path=path))
        return replace(source, inputs=tuple(named))


def _known_input(info: InputInfo) -> InputFile:
    """An input of the dataset, to be counted and not read."""
    position = cast("PositionKind", info.position)
    return InputFile(
        path=info.path, url="", bytes=info.bytes, revision="", format="txt", position=position
    )


def _read_from(store: Store) -> dict[str, InputFile]:
    """The inputs of the newest run, and of those before it, by path; {} if unknown."""
    try:
        return {item.path: item for item in JobFile.read_from(store).inputs}
    except (FileNotFoundError, MalformedJson):
        return {}  # it is no part of the dataset, and may be deleted


def require_filter(recipe: Recipe, made: OwnFilter | None, where: str) -> None:
    """Refuse a recipe that does not name the filter that a dataset was made with.

    Raises:
        UsageError: it names another filter, or none.
    """
    path = made and printable(made.path)
    if recipe.filter != (made and made.path):
        raise UsageError(
            f"the dataset was made with the filter {path}" if path else "it has no filter",
            where=where,
            why="a filter runs code, so it has to be named again" if path else None,
            fix=f"--filter {path}" if path else "leave out --filter",
        )


def already_there(new: str, known: str, *, finished: bool = False) -> InputError:
    """Return the error of an input that the dataset has already, there as `known`.

    Args:
        finished: this was found once the shards were written.
    """
    same = "this input is" if new == known else "an input with the same content is"
    kept = " (the finished shards are kept, so this takes seconds)" if finished else ""
    return InputError(
        f"{same} in the dataset already",
        where=new if new == known else f"{new}, there as {known}",
        why="its documents would be in the dataset twice",
        fix=f"leave it out; or add it all the same: --allow-duplicates{kept}",
    )


def _tokenizer(store: Store, manifest: Manifest) -> TokenizerSpec:
    """Load the dataset's own tokenizer, with its BOS and EOS rule."""
    info = manifest.tokenizer
    spec = own_tokenizer(store, info, manifest.tools.tokenizer or TOKENIZER)
    if TokenizerInfo.of(spec, info.special) != info:
        raise ValidationError(
            "the tokenizer there is not the one that made the dataset",
            where=store.url(TOKENIZER),
            why="new tokens would mean something else than the old ones",
            fix="restore the tokenizer.json the dataset was made with",
        )
    return spec
