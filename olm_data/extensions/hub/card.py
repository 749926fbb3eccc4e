"""The card of a dataset on the hub, README.md: what it holds, its digests, where it comes from.

    counts of a dataset -> our part of the card, between two marks -> README.md

What somebody else wrote outside the marks stays as it is, and a card without marks is not touched.
Everything that comes out of data is shown as code, escaped.
"""

from __future__ import annotations

import json

from olm_data.dataset.manifest import Manifest
from olm_data.errors import printable
from olm_data.extensions.stats.count import ColumnCount, Stats

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
