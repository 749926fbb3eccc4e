"""The child of `probe`: loads a tokenizer.json from stdin and encodes hard texts.

Run by its path, isolated, with three arguments: seconds of processor time, bytes of address space,
and the folder the `tokenizers` package is in. Exits with 0, or with `REFUSED` and a reason on
stdout; a limit ends it by a signal or an error of the library. Never imported.
"""

import json
import resource
import sys

REFUSED = 3
RUN = 2000  # characters of one kind in a row


def main() -> int:
    """Load and try the file; see above."""
    seconds, memory = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path.append(sys.argv[3])
    from tokenizers import Tokenizer

    data = sys.stdin.buffer.read()
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception:
        return 0  # no tokenizer at all: harmless, and the parent says it better
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        for text in texts(data):
            try:
                ids = tokenizer.encode(text, add_special_tokens=False).ids
            except Exception:  # a model without an unknown token cannot encode everything
                continue
            decoded = tokenizer.decode(ids[:RUN], skip_special_tokens=False)
            if len(ids) > 100 * len(text) + 100 or len(decoded) > 100 * len(text) + 100:
                print("a short text becomes more than a hundred times as long")
                return REFUSED
    except BaseException as error:  # a panic of the library is no Exception
        print(f"the library fails on a text: {(str(error).splitlines() or [''])[0]}")
        return REFUSED
    return 0


def texts(data: bytes) -> list[str]:
    """Return texts on which patterns backtrack: runs of one kind, then something else.

    The kinds are common characters and those that the file's own rules are written with; each run
    is also followed by all of these, as a pattern may need one of them to begin at all.
    """
    rules = json.loads(data)
    rules.pop("model", None)
    own = sorted({c for c in json.dumps(rules, ensure_ascii=False)[:100_000] if c.isalnum()})[:80]
    kinds = [*"aA1 \n\t.-_!'", "\u00e9", "\u6f22", "\u0301", "\U0001f600", "\x00", *own]
    ends = ("", "!", "b", "!" + "".join(own))
    made = [kind * RUN + end for kind in kinds for end in ends]
    return [*made, "aB1 " * RUN, "a\n" * RUN, " .a" * RUN, "ab" * RUN + "!"]


if __name__ == "__main__":
    sys.exit(main())
