"""The command that talks with a model in the terminal: a line in, an answer out as it is written.

    line -> conversation -> template -> prompt -> Engine -> text, piece by piece

Turns that no longer fit into what the model looks at are left out, the oldest first; it says so.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import click

from olm_data.command import Command, CountParam, say
from olm_data.errors import UsageError, shown
from olm_data.extras import needs

with needs("talking to a model"):
    from olm_train.extensions.generate.command import checked, sampling_of, sampling_options
    from olm_train.extensions.generate.engine import TextRequest
    from olm_train.extensions.generate.loaded import LoadedModel, of_model
    from olm_train.extensions.generate.sampling import Sampling
    from olm_train.extensions.generate.template import ChatTemplate, Message


COMMANDS = "/new begins anew, Ctrl-C ends an answer, /exit or Ctrl-D ends it all"
_COMMAND = re.compile(r"/[a-z]+")
"""What is no text to be said."""


class Chat:
    """A conversation with a model.

    Args:
        loaded: the model.
        template: makes prompts.
        sampling: of the first answer; each later one has the next seed.
        system: what is said before all turns; empty: nothing.
        stop: an answer ends before any of these strings.
        max_new_tokens: of an answer.
        note: is told what was left out.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        template: ChatTemplate,
        sampling: Sampling,
        *,
        system: str = "",
        stop: tuple[str, ...] = (),
        max_new_tokens: int,
        note: Callable[[str], None],
    ) -> None:
        self._loaded, self._template, self._sampling = loaded, template, sampling
        self._system = [Message("system", system)] if system else []
        self._stop, self._max_new_tokens = (*stop, *template.stops), max_new_tokens
        self._note = note
        self._turns: list[Message] = []
        self._answers = 0

    def forget(self) -> None:
        """Begin anew."""
        self._turns.clear()

    def answer(self, text: str) -> Generator[str, None, None]:
        """Say something; yield the answer piece by piece. What was yielded counts as said.

        Raises:
            UsageError: it is longer than what the model looks at.
        """
        self._turns.append(Message("user", text))
        try:
            request = TextRequest(
                prompt=self._prompt(),
                sampling=self._sampling.after(self._answers),
                max_new_tokens=self._max_new_tokens,
                stop=self._stop,
            )
        except UsageError:
            self._turns.pop()
            raise
        self._answers += 1
        engine = self._loaded.engine(1)
        writing = engine.add(request)
        told = 0
        try:
            while writing.finish is None:
                engine.step()
                piece = writing.text[told : writing.certain]
                told += len(piece)
                if piece:
                    yield piece
            checked(writing)
        finally:
            self._turns.append(Message("assistant", writing.text[:told]))

    def _prompt(self) -> tuple[int, ...]:
        """Return the prompt of as many turns as leave room for an answer."""
        context = self._loaded.context
        left_out = 0
        while True:
            text = self._template.prompt([*self._system, *self._turns])
            prompt = self._loaded.ids_of(text, whole=self._template.whole)
            room = min(self._max_new_tokens, -(-(context or 0) // 4))
            if context is None or len(prompt) + room <= context:
                break
            if len(self._turns) < 3:
                raise UsageError(
                    f"this makes {len(prompt):,} tokens, and the model looks at {context:,}, "
                    "the answer among them",
                    fix="say it in fewer words",
                )
            del self._turns[:2]
            left_out += 2
        if left_out:
            self._note(
                f"note: the oldest {left_out} turns are left out: the model looks at {context:,} "
                "tokens"
            )
        return prompt


def _lines() -> Iterator[str]:
    """Yield what is typed, to Ctrl-D; a line of other input each."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):  # not on each system
        import readline  # noqa: F401  # `input` edits lines with it, and takes a paste as one
    while True:
        try:
            yield input("> ")
        except EOFError:
            click.echo()
            return


@click.command(cls=Command)
@of_model
@click.option("--system", default="", help="Said before all turns.")
@click.option("--max-new-tokens", type=CountParam(1), default=256, show_default=True)
@sampling_options
@click.option("--stop", multiple=True, help="An answer ends before this; may be given again.")
def main(
    loaded: LoadedModel,
    template: ChatTemplate,
    system: str,
    max_new_tokens: int,
    stop: tuple[str, ...],
    **options: Any,
) -> None:
    """Talk with a model in the terminal; answers come as they are written.

    \b
    olm-train chat runs/first
    olm-train chat exported --template chat_template.jinja --stop "<|im_end|>"

    /new begins anew, Ctrl-C ends an answer, /exit or Ctrl-D ends it all. A model that was trained
    on plain text only goes on with the text; that is no answer. For trying a model out: to serve
    one, export it and take a server made for that.
    """
    chat = Chat(
        loaded,
        template,
        sampling_of(options),
        system=system,
        stop=stop,
        max_new_tokens=max_new_tokens,
        note=say,
    )
    if sys.stdin.isatty():
        say(f"{loaded.found.name}: {COMMANDS}")
    for line in _lines():
        if line.strip() == "/exit":
            break
        if line.strip() == "/new":
            chat.forget()
        elif _COMMAND.fullmatch(line.strip()):
            say(f"there is no command {line.strip()}: {COMMANDS}")
        elif line.strip():
            _answer(chat, line)


def _answer(chat: Chat, line: str) -> None:
    answer = chat.answer(line)
    try:
        for piece in answer:
            click.echo(shown(piece), nl=False)
    except KeyboardInterrupt:
        answer.close()
    except UsageError as error:
        say(error)
        return
    click.echo()
