"""The child of `chat_template`: makes texts of a chat template that a stranger wrote.

    stdin: a line of JSON, {"template": ..., "for_data": ..., "values": {...} or null}
        -> stdout: [KIND, text]

Run by its path, isolated, with seconds of time and of processor time, bytes of address space and
bytes of text for each line, and the folders of jinja2 and markupsafe. KIND is `text`, `wrong` (no
template at all), `refused` (the template does not take the conversation) or `failed`. Jinja's
sandbox runs no code of the template; a limit ends the process. Never imported.
"""

import json
import resource
import signal
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn


def main() -> None:
    """Answer lines until there are no more; see above."""
    wall, seconds, memory, most = map(int, sys.argv[1:5])
    sys.path += sys.argv[5:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    known: dict[tuple[str, bool], Any] = {}
    for line in sys.stdin.buffer:
        signal.alarm(wall)
        limit(resource.RLIMIT_CPU, int(time.process_time()) + seconds)
        limit(resource.RLIMIT_AS, memory + 16 * len(line))
        kind, text = _answer(json.loads(line), known)
        size = len(text.encode(errors="surrogatepass"))
        if size > most + 8 * len(line):
            kind, text = "failed", f"it writes {size} bytes"
        print(json.dumps([kind, text]), flush=True)
        signal.alarm(0)


def limit(kind: int, soft: int) -> None:
    """Set the soft limit, and leave the hard one."""
    resource.setrlimit(kind, (soft, resource.getrlimit(kind)[1]))


def _answer(given: Mapping[str, Any], known: dict[tuple[str, bool], Any]) -> tuple[str, str]:
    """Return the kind and the text of an answer; `known`: templates by their text and use."""
    from jinja2 import TemplateError

    which, values = (given["template"], given["for_data"]), given["values"]
    try:
        if which not in known:
            try:
                known[which] = environment(which[1]).from_string(which[0])
            except TemplateError as error:
                return "wrong", str(error)[:300]
        return "text", "" if values is None else known[which].render(**values)
    except Exception as error:
        kind = "refused" if getattr(error, "of_template", False) else "failed"
        return kind, (str(error) or type(error).__name__)[:300]


def environment(for_data: bool) -> Any:
    """Return Jinja as transformers sets it up: the same names mean the same.

    Args:
        for_data: there is no clock, and answers are marked.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", generation_tag(for_data)],
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    if not for_data:
        made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def generation_tag(marked: bool) -> type[Any]:
    """Return what makes `{% generation %}` known, which encloses the answers to train on."""
    from jinja2.ext import Extension
    from jinja2.nodes import Node, Output, Scope, TemplateData
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if not marked:
                return body
            begin, end = (Output([TemplateData(mark)]) for mark in ("\ufdd2", "\ufdd3"))
            return [begin, Scope(body), end]

    return GenerationTag


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON; that of Jinja escapes what HTML must."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def refuse(message: str) -> NoReturn:
    """Say that the template does not take the conversation."""
    from jinja2 import TemplateRuntimeError

    error = TemplateRuntimeError(message)
    error.of_template = True  # type: ignore[attr-defined]
    raise error


if __name__ == "__main__":
    main()
