"""An event of a run that a person may want to be told of, and how a service takes it.

    Notice --redacted--> payload: hooks.slack.com | discord.com | any other host (plain JSON)

Pure.
"""

from __future__ import annotations

import hashlib
import os
import re
from enum import StrEnum
from urllib.parse import parse_qsl, urlsplit

import msgspec
from msgspec import structs

from olm_data.errors import UsageError, shown
from olm_data.redaction import hold, redacted

VARIABLE = "SLACK_WEBHOOK_URL"
"""Of the environment: the address, of any service, where none is given."""
MOST_LINES = 30
MOST_LETTERS = 1800
"""Of a text; Discord takes 2,000 for a message."""
SECRET = 16
"""Letters from which on a part of a webhook's path is taken for a credential without a digit."""


class Event(StrEnum):
    """What may happen to a run."""

    start = "start"
    """A new run is about to take its first step."""
    resume = "resume"
    """A run goes on from a checkpoint."""
    first_step = "first_step"
    """The first step of this start is done: data, devices and compiling work."""
    spike = "spike"
    """A spike that `stability_monitor` saw."""
    skip = "skip"
    """A step left the weights as they were."""
    rewind = "rewind"
    """The run went back to a checkpoint, and leaves rows out."""
    save_failed = "save_failed"
    """A checkpoint could not be written; training goes on."""
    stalled = "stalled"
    """No step was finished for a while."""
    finished = "finished"
    """The last step is done and the last checkpoint is complete."""
    cancelled = "cancelled"
    """Somebody ended the run before its last step; its checkpoint is complete."""
    failed = "failed"
    """An error ended the run."""
    lost = "lost"
    """The process of the run is gone without a word; only `olm-train notify` can tell."""


ENDS = (Event.finished, Event.cancelled, Event.failed)


class NotificationSetting(StrEnum):
    """Which events are told."""

    none = "none"
    """None."""
    all = "all"
    """Each."""
    end_only = "end_only"
    """How the run ended: finished, cancelled or failed."""
    failure_only = "failure_only"
    """That it failed."""

    @property
    def events(self) -> frozenset[Event]:
        """Those events."""
        return {
            NotificationSetting.none: frozenset[Event](),
            NotificationSetting.all: frozenset(Event),
            NotificationSetting.end_only: frozenset(ENDS),
            NotificationSetting.failure_only: frozenset({Event.failed}),
        }[self]


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """One message.

    Attributes:
        event: what happened.
        run: name of the run, for people.
        step: optimiser steps done then; with `event` it says which message of the run this is.
        text: in words.
        time: seconds since 1970.
    """

    event: Event
    run: str
    step: int
    text: str
    time: float


def payload(url: str, notice: Notice) -> bytes:
    """Return the JSON that the host of a webhook takes for a message.

    One of an unknown kind gets the message, and an `id` that is the same for the same message,
    should it arrive twice; a service that takes Slack's `text` shows it.
    """
    run, text = plain(notice.run), plain(notice.text)
    line = f"{run}: {notice.event.replace('_', ' ')} at step {notice.step:,}\n{text}".strip()
    host = (urlsplit(url).hostname or "").lower()
    if host == "hooks.slack.com" or host == "hooks.slack-gov.com":
        # its control characters: nobody is called by a text
        for letter, code in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            line = line.replace(letter, code)
        return msgspec.json.encode({"text": line})
    if host.removeprefix("ptb.").removeprefix("canary.") in ("discord.com", "discordapp.com"):
        nobody: dict[str, list[str]] = {"parse": []}
        return msgspec.json.encode({"content": line[:2000], "allowed_mentions": nobody})
    key = hashlib.sha256(f"{run}\n{notice.event}\n{notice.step}".encode()).hexdigest()[:16]
    return msgspec.json.encode({**structs.asdict(notice), "run": run, "text": line, "id": key})


def plain(text: str) -> str:
    """Return a text without credentials and control characters, cut to what a message holds.

    Redacted first: a cut may leave a piece that nothing recognises any more.
    """
    lines = shown(redacted(text)).splitlines()
    more = [f"... {len(lines) - MOST_LINES:,} more lines"] if len(lines) > MOST_LINES else []
    kept = "\n".join([*lines[:MOST_LINES], *more])
    return kept if len(kept) <= MOST_LETTERS else kept[:MOST_LETTERS] + " ..."


def address(given: str | None, where: str) -> str:
    """Return a webhook's address, given or from the environment; from here on it is hidden.

    Args:
        where: the option that may give it.

    Raises:
        UsageError: there is none, or it is none.
    """
    url = given or os.environ.get(VARIABLE, "")
    if not url:
        raise UsageError(
            "there is no webhook to send to",
            where=where,
            fix=f"set the environment variable {VARIABLE}, or give {where}",
        )
    hide(url)
    return url


def hide(url: str) -> None:
    """Let no text of this process show what is secret of a webhook's address.

    Raises:
        UsageError: it is no address of a webhook; the message does not repeat it.
    """
    parts = urlsplit(url) if re.fullmatch(r"https?://[!-~]+", url) else None
    if parts is None or not parts.hostname:
        raise UsageError(
            "the webhook's address does not begin with https:// or http:// and a host",
            where="webhook_url",
            fix="copy it from the service that gave it; it is not shown here",
        )
    values = [value for _, value in parse_qsl(parts.query)]
    pieces = [*parts.path.split("/"), *values, parts.password]
    hold(*(p for p in pieces if p and (any(map(str.isdigit, p)) or len(p) >= SECRET)))
