"""The tables of the reference page of families: `python tests/support/hf_page.py` writes them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1])]
from olm_train.extensions.hf.fields import Row  # noqa: E402

PAGE = HERE.parents[1] / "docs/reference/hugging-face.md"

MODELS = {
    "llama": "Llama 2 and 3 (3.1 and 3.2 with `llama3` scaling), and models of that code",
    "qwen2": "Qwen 2 and 2.5",
    "qwen3": "Qwen 3, dense",
    "mistral": "Mistral 7B and Nemo",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "smollm3": "SmolLM 3",
    "gemma3": "Gemma 3, text only (270M, 1B)",
    "gemma2": "Gemma 2",
    "gpt2": "GPT-2",
    "olmoe": "OLMoE",
    "qwen3_moe": "Qwen 3, mixtures of experts",
}


def families() -> Iterator[str]:
    """Lines of the table of families."""
    from olm_train.extensions.hf.table import FAMILIES

    yield from ("| family | architecture | `model_type` | published |", "| --- | --- | --- | --- |")
    for family in FAMILIES:
        yield (
            f"| {family.name} | `{family.architecture}` | `{family.model_type}` "
            f"| {MODELS[family.name]} |"
        )


def fields() -> Iterator[str]:
    """Lines of the tables of fields: those of all families but GPT-2, and a family each."""
    from olm_train.extensions.hf.table import FAMILIES

    said = {family.name: [line(row) for row in family.rows if row.says] for family in FAMILIES}
    first, *others = (lines for name, lines in said.items() if name != "gpt2")
    shared = [each for each in first if all(each in lines for lines in others)]
    for name, lines in {"All but GPT-2": shared, **said}.items():
        own = [each for each in lines if each not in shared or lines is shared]
        yield from ("", f"### {name}", "", "| theirs | ours |", "| --- | --- |", *own)


def line(row: Row) -> str:
    """A line of a table of fields."""
    theirs = ", ".join(f"`{name}`" for name in row.theirs) or "-"
    return f"| {theirs} | {row.says} |"


def rendered(page: str) -> str:
    """Return the page with both parts as the table has them now."""
    for name, lines in (("families", families()), ("fields", fields())):
        text = "\n".join(lines)
        page = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
            lambda found, text=text: f"{found[1]}{text}\n\n{found[2]}",
            page,
            flags=re.DOTALL,
        )
    return page


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
