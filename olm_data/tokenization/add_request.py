"""What `olm-data add` goes on top of: a dataset opened for additions, as values.

    dataset -> Existing -> find_source (what is left open is as in the dataset)
                        -> refuse_known (inputs that are there already)
                        -> request -> plan: units of the new inputs, shards numbered on

Never: writes anything, or reads more of the new inputs than their layout.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import cast

import msgspec

from olm_data.bounded_json import MalformedJson
from olm_data.dataset.choices import SpecialPolicy
from olm_data.dataset.history import read_plans
from olm_data.dataset.inputs import InputFile, PositionKind
from olm_data.dataset.job import JobFile
from olm_data.dataset.manifest import EXCLUDED, MAX_IDS, InputInfo, Manifest, read_manifest
from olm_data.dataset.options import Options
from olm_data.dataset.plan import Plan
from olm_data.dataset.tokenizer import TOKENIZER, TokenizerInfo, own_tokenizer
from olm_data.errors import InputError, ValidationError, printable
from olm_data.select.selection import IdSet
from olm_data.sources import resolve_source
from olm_data.sources.base import SourcePlan
from olm_data.storage.store import Store
from olm_data.tokenization.recipe import Recipe
from olm_data.tokenization.request import Base, Request
from olm_data.tokenizer.tokenizer import TokenizerSpec


@dataclass(frozen=True, kw_only=True)
class Existing:
    """A dataset that something is to be added to.

    Attributes:
        store: its folder.
        manifest, options: of its newest version, and how it was made.
        plans: of all its versions, in order.
        tokenizer: the one that made it.
        places: where its inputs were read, by path, as far as job.json tells.
    """

    store: Store
    manifest: Manifest
    options: Options
    plans: Sequence[Plan]
    tokenizer: TokenizerSpec
    places: Mapping[str, InputFile]

    @classmethod
    def open(cls, path: str, *, single_writer: bool = False) -> Existing:
        """Open the dataset at a local path or URL.

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
        return cls(
            store=store,
            manifest=manifest,
            options=manifest.tokenized,
            plans=read_plans(store, manifest),
            tokenizer=_tokenizer(store, manifest),
            places=_places(store),
        )

    def base(self, additions: int) -> Base:
        """Return what the next addition goes on top of, after the first `additions` of them."""
        inputs, digest = self.manifest.inputs, str(self.manifest.digest)
        if additions < len(self.manifest.additions):
            following = self.manifest.additions[additions]
            inputs, digest = inputs[: following.first_input], following.parent
        last = self.plans[additions]
        return Base(
            digest=digest,
            number=additions + 1,
            inputs=tuple(self.places.get(item.path) or _known_input(item) for item in inputs),
            shards=last.settings.first_shard + len(last.tasks),
        )

    def find_source(self, recipe: Recipe, inputs: Sequence[str]) -> SourcePlan:
        """Return the source that a recipe names; what it leaves open is as in the dataset.

        Args:
            recipe: says what is read, and how; a limit of an earlier run does not go on.
            inputs: those of the recipe, with a file in the place of standard input.

        Raises:
            UsageError, InputError, StorageError: as `sources.resolve_source`.
            InputError: the new inputs lack a column that is kept in the dataset.
        """
        options = self.options
        text_column, id_column = recipe.text_column, recipe.id_column
        if recipe.source is None:
            text_column = text_column or options.text_column
            there = {None: "none", "id": None}  # "id" is taken where there is one
            id_column = id_column or there.get(options.id_column, options.id_column)
        names = [f"{name}:{kind}" for name, kind in options.keep]
        found = resolve_source(
            inputs,
            source=recipe.source,
            subset=recipe.subset,
            root=recipe.root,
            split=recipe.split,
            text_column=text_column,
            id_column=id_column,
            keep=names,
            separator=recipe.separator,
            delimiter=recipe.delimiter,
            where=options.where,
            on_invalid=options.on_invalid,
            on_unknown=options.on_unknown,
        )
        texts = any(item.format == "txt" for item in found.inputs)
        ids = self._excluded()
        if ids is not None and found.options.id_column is None and not texts:
            raise InputError(
                "the new records have no ids, and the dataset was made with --exclude-ids",
                where=found.inputs[0].path,
                fix="say which column or field holds them: --id-column NAME",
            )
        selected = msgspec.structs.replace(
            found.options,
            separator=recipe.separator or (options.separator if texts else None),
            exclude=options.exclude,
            sample=options.sample,
            seed=options.seed,
        )
        return replace(found, options=selected, excluded=ids)

    def _excluded(self) -> IdSet | None:
        """The ids that the dataset leaves out."""
        digest = self.options.exclude
        if digest is None:
            return None
        url = self.store.url(EXCLUDED)
        try:
            ids = IdSet.from_npy(self.store.read(EXCLUDED, limit=MAX_IDS))
        except (FileNotFoundError, ValueError) as error:
            raise ValidationError(
                "the ids that the dataset leaves out are missing or damaged", where=url
            ) from error
        if ids.sha256 != digest:
            raise ValidationError("these are not the ids that the dataset leaves out", where=url)
        return ids

    def request(self, recipe: Recipe, source: SourcePlan, additions: int | None = None) -> Request:
        """Return the request that adds `source`, on top of the first `additions` (all of them)."""
        count = len(self.manifest.additions) if additions is None else additions
        base, options = self.base(count), self.options
        return Request(
            recipe=msgspec.structs.replace(
                recipe,
                output=self.store.root,
                special=cast(SpecialPolicy, self.manifest.tokenizer.special),
                holdout=Fraction(options.holdout),
                sample=None if options.sample is None else Fraction(options.sample),
                dedup=options.dedup,
                container=self.manifest.container,
                shuffle_documents=options.shuffle_documents,
                seed=options.seed if options.sample or options.shuffle_documents else None,
            ),
            source=replace(source, inputs=_named_apart(base.inputs, source.inputs)),
            tokenizer=self.tokenizer,
            base=base,
        )

    def refuse_known(self, source: SourcePlan) -> None:
        """Refuse inputs that are in the dataset already, as far as can be told without reading.

        Raises:
            InputError: an input of the same name and size, of the same size and modification time
                or ETag, or at the same place, is in the dataset; names both.
        """
        sizes = {item.path: item.bytes for item in self.manifest.inputs}
        urls = {item.url: path for path, item in self.places.items() if item.url and path in sizes}
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
                raise in_twice(item.path, known)

    def done_by(self, recipe: Recipe, source: SourcePlan) -> bool:
        """Whether the newest version is what adding `source` to the one before made."""
        last = len(self.manifest.additions) - 1
        if last < 0:
            return False
        plan = self.request(recipe, source, last).plan()
        return plan.digest == self.manifest.additions[last].plan


def _known_input(info: InputInfo) -> InputFile:
    """An input of the dataset, to be counted and not read."""
    position = cast(PositionKind, info.position)
    return InputFile(
        path=info.path, url="", bytes=info.bytes, revision="", format="txt", position=position
    )


def _places(store: Store) -> dict[str, InputFile]:
    """Where the inputs of the newest run, and of those before it, were read; {} if unknown."""
    try:
        return {item.path: item for item in JobFile.read_from(store).inputs}
    except (FileNotFoundError, MalformedJson):
        return {}  # it is no part of the dataset, and may be deleted


def _named_apart(known: Sequence[InputFile], new: Sequence[InputFile]) -> tuple[InputFile, ...]:
    """Name each new input whose name is taken by more of the folders it lies in."""
    taken = {item.path for item in known}
    named = []
    for item in new:
        path = item.path
        if path in taken:
            parts = (item.url.partition("://")[2] or item.url).strip("/").split("/")
            own = path.count("/") + 1
            names = [posixpath.join(*parts[-n:]) for n in range(own + 1, len(parts) + 1)]
            free = (name for name in names if name not in taken)
            path = next(free, path)  # a plan with a name twice is refused
        taken.add(path)
        named.append(msgspec.structs.replace(item, path=path))
    return tuple(named)


def in_twice(new: str, known: str, *, finished: bool = False) -> InputError:
    """Return the error of an input that the dataset has already, there as `known`."""
    same = "this input is" if new == known else "an input with the same content is"
    kept = " (the finished shards are kept, so this takes seconds)" if finished else ""
    return InputError(
        f"{same} in the dataset already",
        where=printable(new if new == known else f"{new}, there as {known}"),
        why="its documents would be in the dataset twice",
        fix=f"leave it out; or add it all the same: --allow-duplicates{kept}",
    )


def _tokenizer(store: Store, manifest: Manifest) -> TokenizerSpec:
    """Load the dataset's own tokenizer, with its BOS and EOS rule."""
    info = manifest.tokenizer
    name = manifest.tools.tokenizer or TOKENIZER
    spec = own_tokenizer(store, info, name)
    if TokenizerInfo.of(spec, info.special) != info:
        raise ValidationError(
            "the tokenizer there is not the one that made the dataset",
            where=store.url(TOKENIZER),
            why="new tokens would mean something else than the old ones",
            fix="restore the tokenizer.json the dataset was made with",
        )
    return spec
