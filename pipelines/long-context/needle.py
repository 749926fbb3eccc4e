"""Make a needle test: is what stood far before still known?

    python needle.py ../quickstart/out/tokenizer.json 900 out/needle-900.jsonl

A context of so many tokens is text of this machine's Python library, with four sentences put into
it that give a name a number each. It ends asking for one of the numbers; the choices are the four.
A model that does not look back is right a quarter of the time. The output is for
`olm-data eval-set build`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer

NAMES = ["fox", "river", "candle", "stone", "garden", "letter", "window", "tower"]
QUESTIONS = 100


def question(
    tokenizer: Tokenizer, tokens: int, lines: list[str], draw: random.Random
) -> dict[str, object]:
    """Return a question whose context has at most `tokens` tokens, and at most a line's fewer."""
    names = draw.sample(NAMES, 4)
    numbers = [str(number) for number in draw.sample(range(1000, 10000), 4)]
    needles = [
        f"The number of the {name} is {number}.\n"
        for name, number in zip(names, numbers, strict=True)
    ]
    gold = draw.randrange(4)
    ask = f"The number of the {names[gold]} is"

    def length(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    begin, hay = draw.randrange(len(lines)), list[str]()
    room = tokens - length("".join(needles) + ask)
    while (room := room - length(line := lines[(begin + len(hay)) % len(lines)])) >= 0:
        hay.append(line)
    for needle in needles:
        hay.insert(draw.randint(0, len(hay)), needle)
    return {"context": "".join(hay) + ask, "choices": [f" {n}" for n in numbers], "gold": gold}


def main(tokenizer: str, tokens: int, output: Path) -> None:
    lines = [
        f"{line}\n" for _, text in sorted(topics.items()) for line in text.splitlines() if line
    ]
    made, draw = Tokenizer.from_file(tokenizer), random.Random(tokens)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w", encoding="utf-8") as file:
        for _ in range(QUESTIONS):
            print(json.dumps(question(made, tokens, lines, draw)), file=file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
