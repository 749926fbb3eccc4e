"""What a message looks like to a service, and what never stands in one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from olm_data.errors import UsageError
from olm_data.redaction import redacted
from olm_train.callbacks.notice import Event, Notice, NotificationSetting, hide, payload


def notice(text: str = "loss 2.5", **changed: Any) -> Notice:
    values = {"event": Event.failed, "run": "lab", "step": 1234, "text": text, "time": 1.5}
    return Notice(**{**values, **changed})


def sent(url: str, text: str = "loss 2.5", **changed: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(payload(url, notice(text, **changed)))
    return decoded


def test_slack_gets_text_whose_control_characters_are_escaped() -> None:
    body = sent("https://hooks.slack.com/services/T1/B1/x", "a <!channel> & b")
    assert body == {"text": "lab: failed at step 1,234\na &lt;!channel&gt; &amp; b"}


@pytest.mark.parametrize("host", ["discord.com", "ptb.discord.com", "discordapp.com"])
def test_discord_gets_content_that_calls_nobody(host: str) -> None:
    body = sent(f"https://{host}/api/webhooks/1/x", "@everyone " + "x" * 5000)
    assert body["allowed_mentions"] == {"parse": []}
    assert body["content"].startswith("lab: failed at step 1,234\n@everyone xxx")
    assert len(body["content"]) <= 2000


def test_any_other_host_gets_json_with_a_key_that_is_the_same_for_the_same_message() -> None:
    url = "https://example.org/hooks.slack.com"
    body, other = sent(url), sent(url, step=1235)
    key = body.pop("id")
    assert body == {
        "event": "failed",
        "run": "lab",
        "step": 1234,
        "text": "lab: failed at step 1,234\nloss 2.5",
        "time": 1.5,
    }
    assert key == sent(url, "told again", time=9.0)["id"] != other["id"]


def test_credentials_are_masked_before_a_text_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "Zq8vN3kLp0TyWx5R"
    monkeypatch.setenv("LAB_API_TOKEN", secret)
    line = f"{'x' * 1795}{secret} s3://bucket?X-Amz-Signature=deadbeefdeadbeef"
    text = payload("https://a.b/c", notice(line, run=f"run-{secret}")).decode()
    assert not any(secret[k : k + 8] in text for k in range(len(secret) - 7))
    assert "deadbeef" not in text
    assert "***" in text


def test_a_long_text_says_how_many_lines_are_left_out() -> None:
    text = sent("https://a.b/c", "\n".join(f"line {n}" for n in range(100)))["text"]
    assert "line 29" in text
    assert "line 30" not in text
    assert text.endswith("... 70 more lines")


def test_what_is_secret_of_an_address_shows_in_no_text_of_the_process() -> None:
    hide("https://example.org/services/T0Qw9Er8/nothing-but-letters-here?key=Ty7Ui6Op5")
    for secret in ("T0Qw9Er8", "nothing-but-letters-here", "Ty7Ui6Op5"):
        assert secret not in redacted(f"could not reach {secret}")
    assert redacted("services of example.org") == "services of example.org"


@pytest.mark.parametrize(
    "url", ["ftp://host/Secret1", "Secret1", "https:///Secret1", "https://a b"]
)
def test_what_is_no_address_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(UsageError, match="does not begin with https") as error:
        hide(url)
    assert "Secret1" not in str(error.value)


def test_each_setting_has_its_events() -> None:
    ends = {Event.finished, Event.cancelled, Event.failed}
    assert NotificationSetting.none.events == set()
    assert NotificationSetting.all.events == set(Event)
    assert NotificationSetting.end_only.events == ends
    assert NotificationSetting.failure_only.events == {Event.failed}
