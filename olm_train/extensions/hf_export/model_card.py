"""README.md of an exported model: front matter that hubs read, what it was made of, how to use it.

Never: a path, a host or a name of a machine. What a model learned is for its maker to write.
"""

from __future__ import annotations

from olm_data.errors import printable
from olm_data.mixture.lock import Lock
from olm_data.model_receipt import Claim

CARD = "README.md"


def model_card(
    claim: Claim,
    *,
    model_class: str,
    parameters: int,
    step: int,
    lock: Lock | None,
    chat: bool,
    has_tokenizer: bool,
) -> bytes:
    """Return the bytes of the file.

    Args:
        claim: which export it is.
        model_class: that readers make.
        parameters: of the model.
        step: of the checkpoint.
        lock: mixture it was trained on; None: nobody recorded it.
        chat: whether there is a chat template.
        has_tokenizer: whether there is a tokenizer.
    """
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    front += ["tags:", "- olm-data", *(["- conversational"] if chat else []), "---"]
    rows = [
        ("class", f"`{model_class}`"),
        ("parameters", f"{parameters:,}"),
        ("weights", claim.dtype),
        ("optimiser steps", f"{step:,}"),
        ("checkpoint", f"`{claim.checkpoint}`"),
    ]
    lines = [*front, "", f"# {model_class}, step {step:,}", ""]
    lines += ["Exported by olm-data from a checkpoint whose every file was verified.", ""]
    if lock is not None:
        rows.append(("sequence length", f"{lock.sequence_length:,}"))
        rows.append(("mixture lock", f"`{lock.digest}`"))
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows), ""]
    if lock is not None:
        lines += [
            "## Data",
            "",
            "| source | tokens | digest of the dataset |",
            "| --- | --- | --- |",
        ]
        lines += [
            f"| {_cell(source.name)} | {source.tokens:,} | `{source.dataset}` |"
            for source in lock.sources
        ]
        lines.append("")
    lines += ["## Use", ""]
    if has_tokenizer:
        lines += [
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'folder = "."  # this one',
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
            "model = AutoModelForCausalLM.from_pretrained(folder)",
            'ids = tokenizer("Once upon a time", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**ids, max_new_tokens=40)[0]))",
            "```",
        ]
    else:
        lines.append("There is no tokenizer with this model: none lay with the data.")
    lines += [
        "",
        "`olm-export.json` says what was proved of these files, and by which program.",
        "",
    ]
    return "\n".join(lines).encode()


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|")
