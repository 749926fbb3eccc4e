"""A dataset as it is pushed and pulled: its manifest names the files, `verify` knows the damage.

    manifest.json, plan*.json -> names -> sha256, where something says it -> Content

The manifest is what makes it whole. What lies beside the files that it and its plans name is not
sent: heartbeats, dropped records, and `job.json`, which holds paths of the machine that made the
dataset.

Also: the card of a dataset on the hub, README.md: what it holds, its digests, where it comes
from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import msgspec

from olm_data.dataset.docs import DOCS
from olm_data.dataset.manifest import (
    EXCLUDED,
    MANIFEST,
    PLAN,
    VALIDATION,
    Manifest,
    decode_manifest,
    read_manifest,
    version_name,
)
from olm_data.dataset.plan import plan_name, read_plans
from olm_data.dataset.record import RECORD
from olm_data.dataset.shard import ENDS, LABELS
from olm_data.dataset.target import dataset_root
from olm_data.dataset.tokenizer import TOKENIZER
from olm_data.errors import ConflictError, UsageError, printable
from olm_data.extensions.hub.content import CARD, MOST_CARD, Branch, Content, Watch
from olm_data.extensions.stats.count import ColumnCount, Stats, collect
from olm_data.extensions.verify.datasets import verify
from olm_data.model_folder import CONFIG
from olm_data.regular_files import MAX_DOCUMENT
from olm_data.storage.destination import RECORD as RECEIPT
from olm_data.storage.store import Store

_BEGIN = "<!-- begin: written by olm-data push -->"
_END = "<!-- end: written by olm-data push -->"
_LICENCES = ("license", "licence")
_ROWS = 12


def dataset_card(
    before: str | None, *, manifest: Manifest, stats: Stats, address: str, licence: str | None
) -> str | None:
    """Return a card.

    Args:
        before: the card that is there; None: there is none.
        address: `hf://datasets/ORG/NAME`.
        licence: of the texts, as the hub calls it; None: not stated.

    Returns:
        The card; None where the one that is there is not ours to change.
    """
    section = f"{_BEGIN}\n{_section(manifest, stats, address, licence)}{_END}"
    if before is None:
        return f"{_front_matter(licence, bool(manifest.shards))}\n{section}\n"
    head, began, rest = before.partition(_BEGIN)
    _, ended, tail = rest.partition(_END)
    return head + section + tail if began and ended else None


def _front_matter(licence: str | None, rows: bool) -> str:
    lines = ["---", "tags:", "- olm-data", "- tokenized"]
    if licence is not None:
        lines.append(f"license: {json.dumps(licence)}")
    if rows:  # the hub's viewer shows where each document came from
        lines += [
            "configs:",
            "- config_name: documents",
            "  data_files:",
            "  - split: train",
            '    path: "shard-*.docs.parquet"',
        ]
    return "\n".join([*lines, "---"])


def _section(manifest: Manifest, stats: Stats, address: str, licence: str | None) -> str:
    rules = manifest.tokenizer
    facts = {
        "tokens": f"{stats.tokens:,} ({manifest.dtype})",
        "documents": f"{stats.documents:,}",
        "bytes of text": f"{stats.text_bytes:,}",
        "shards": f"{stats.shards:,}",
        "dataset digest": _code(str(manifest.digest)),
        "tokenizer": f"{_code(stats.tokenizer)}, {rules.vocab_size:,} ids; sha256 of "
        f"`tokenizer.json` {_code(rules.sha256)}, of the ids of the probe texts "
        f"{_code(rules.probe_sha256)}",
        "begin and end of a document": f"BOS {rules.bos}, EOS {rules.eos}",
        "held out": f"{stats.other_split:,} documents, in `validation/`",
        "dropped": ", ".join(f"{n:,} {_code(why)}" for why, n in stats.dropped.items()) or "none",
    }
    lines = [
        "# Tokens of a text corpus",
        "",
        "Token shards in plain NumPy and Parquet files, made by `olm-data`. Check every byte of a",
        "copy, or train on it:",
        "",
        "```bash",
        f"olm-data pull {address} ./tokens",
        "olm-data verify ./tokens",
        "```",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in facts.items()),
        "",
        "## Sources",
        "",
        "| input | documents | tokens |",
        "|---|---|---|",
        *(
            f"| {_code(item.path)} | {item.documents:,} | {item.tokens:,} |"
            for item in stats.inputs[:_ROWS]
        ),
    ]
    shown = min(_ROWS, len(stats.inputs))
    if stats.inputs_all > shown:
        lines.append(f"| and {stats.inputs_all - shown:,} more | | |")
    lines += ["", "## Licences of the texts", "", *_licences(stats.columns, licence), ""]
    return "\n".join(lines)


def _licences(columns: list[ColumnCount], licence: str | None) -> list[str]:
    said = [f"Stated by whoever published it: {_code(licence)}."] if licence else []
    for column in columns:
        if column.name.lower() in _LICENCES and column.top:
            said += ["", f"The column {_code(column.name)} of the documents says:", ""]
            said += [f"* {_code(value)}: {count:,} documents" for value, count in column.top]
            if column.nulls:
                said.append(f"* nothing: {column.nulls:,} documents")
    return said or ["Not stated. The licences of the sources hold."]


def _code(text: str) -> str:
    """Return a text of strangers as code in a cell of a table: nothing in it is markup."""
    plain = printable(text)[:200].replace("`", "'").replace("|", "\\|")
    return f"`{plain}`"


NAMING = re.compile(rf"({VALIDATION}/)?(manifest|plan(-\d{{5,9}})?)\.json")
"""Files that must be there before it can be told which others are parts."""


class Datasets:
    """See `ContentKind`."""

    name = "dataset"

    def target(self, target: str) -> str:
        """Return the folder that an argument names; refuse that of an exported model."""
        root = dataset_root(target)
        store = Store(root)
        if not store.exists(MANIFEST) and (store.exists(RECEIPT) or store.exists(CONFIG)):
            raise UsageError(
                "this is the address of a dataset; an exported model goes to hf://ORG/NAME",
                where=target,
                fix="leave datasets/ out of the address",
            )
        return root

    def is_naming(self, name: str) -> bool:
        """Whether it is a manifest or a plan."""
        return NAMING.fullmatch(name) is not None

    def is_whole(self, has: Callable[[str], bool]) -> bool:
        """Whether there is a manifest."""
        return has(MANIFEST)

    def read(self, store: Store, has: Callable[[str], bool]) -> Content:
        """Return what a manifest and its plans name."""
        parts = {**dataset_parts(store, has), MANIFEST: ""}
        return Content(store, str(read_manifest(store).digest), parts, (MANIFEST,))

    def damage(self, content: Content, watch: Watch) -> str | None:
        """Return the first finding of `olm-data verify`, and how many there are."""
        root = content.store.root
        report = verify(root, watch=lambda done, total: watch("verify", done, total))
        if report.ok:
            return None
        return f"{len(report.findings):,} findings, the first of them: {report.findings[0]}"

    def settled(self, content: Content, branch: Branch, notes: list[str]) -> Content:
        """Refuse a branch with another dataset than this one or a version before it."""
        data = branch.read(MANIFEST, MAX_DOCUMENT)
        if data is None:
            return content
        manifest = read_manifest(content.store)
        found = decode_manifest(data, f"{branch.place.address}/{MANIFEST}")
        if found.digest not in {manifest.digest, *(item.parent for item in manifest.additions)}:
            raise ConflictError(
                f"the repository holds another dataset, of digest {str(found.digest)[:12]}",
                where=branch.place.address,
                why=f"it is no earlier version of {content.digest[:12]}, and its readers would "
                "get another dataset under the same name",
                fix="push to another repository, or to a new branch of this one: --revision NAME",
            )
        return content

    def card(
        self, content: Content, branch: Branch, licence: str | None, notes: list[str]
    ) -> bytes | None:
        """Return the card, with what others wrote around our part of it."""
        data = branch.read(CARD, MOST_CARD)
        before = None if data is None else data.decode(errors="replace")
        text = dataset_card(
            before,
            manifest=read_manifest(content.store),
            stats=collect(content.store.root),
            address=branch.place.address,
            licence=licence,
        )
        if text is None:
            notes.append(f"{CARD} has no part of ours and is left as it is")
        elif before is not None and licence is not None:
            notes.append(
                f"the front matter of {CARD} is left as it is, --licence is only in its text"
            )
        return None if text is None else text.encode()


def dataset_parts(store: Store, has: Callable[[str], bool]) -> dict[str, str]:
    """Return the files of a dataset but its manifest: name -> sha256, "" where nothing says it.

    Args:
        store: where `NAMING` files can be read.
        has: whether a file is there, by its name.

    Raises:
        InputError: there is no dataset.
        ValidationError: its manifest or a plan is damaged.
    """
    manifest = read_manifest(store)
    parts = {TOKENIZER: manifest.tokenizer.sha256}
    if has(PLAN):
        for number, plan in enumerate(read_plans(store, manifest)):
            parts[plan_name(number)] = ""
            parts |= dict.fromkeys((name + RECORD for name in plan.shards), "")
    for info in manifest.shards:
        names = {
            "tokens": manifest.tokens_name(info),
            "ends": info.name + ENDS,
            "docs": info.name + DOCS,
            "record": info.name + RECORD,
        } | ({} if info.runs is msgspec.UNSET else {"labels": info.name + LABELS})
        parts |= {name: info.sha256[kind] for kind, name in names.items()}
    parts |= {version_name(addition.parent): "" for addition in manifest.additions}
    if has(EXCLUDED):
        parts[EXCLUDED] = ""
    if has(f"{VALIDATION}/{MANIFEST}"):
        child = dataset_parts(store.child(VALIDATION), lambda name: has(f"{VALIDATION}/{name}"))
        parts |= {f"{VALIDATION}/{name}": sha256 for name, sha256 in child.items()}
        parts[f"{VALIDATION}/{MANIFEST}"] = ""
    return parts
