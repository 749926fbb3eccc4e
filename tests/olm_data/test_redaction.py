"""Redaction: credentials by shape and by value, before any cut; data stays."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support.command import Olm, environment
from support.hostile_s3 import SECRETS, SPELLINGS, TOKEN, leaked
from support.racing import race

from olm_data import redaction
from olm_data.errors import InputError, UsageError, refuse_secrets, said_by, words
from olm_data.redaction import echoes, hold, names_credentials, redacted
from olm_data.runners.base import attempt
from olm_data.storage.plaintext_warning import warn_plaintext

SHAPES = {
    "user in a URL": "see https://canaryuser:canarypass@host/x",
    "token as user": "see https://canarytoken@host/x",
    "presigned": "s3://b/x?X-Amz-Credential=canary1&X-Amz-Signature=canary2&a=1",
    "Google": "https://storage/x?X-Goog-Signature=canary1&GoogleAccessId=canary2",
    "Azure": "https://a.blob.core.windows.net/c?sv=1&sig=canary1",
    "query": "https://host/x?access_token=canary1&api_key=canary2&key=canary3",
    "header": "Authorization: AWS4-HMAC-SHA256 Credential=canary/x, Signature=canary",
    "header of a mapping": "{'Authorization': 'Bearer canarycanary.canary'}",
    "bearer": "the hub got Bearer canarycanarycanary and refused",
    "session token": "x-amz-security-token: canary/canary+canary==",
    "signature": "SignedHeaders=host, Signature=canary",
    "hub": "token hf_canaryCanary0123456789abc was refused",
    "key id": "AKIACANARYCANARY1234 does not exist",
}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of this process uses the credentials of `support.hostile_s3`."""
    monkeypatch.setattr(redaction, "_held", set())
    hold(*SECRETS)


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES)
def test_s3_a_credential_is_known_by_its_shape(text: str) -> None:
    assert "canary" not in redacted(text).lower()
    assert "***" in redacted(text)


PASSWORDS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Z", "Cc", "Cs"]), min_size=1, max_size=20
)


@settings(max_examples=200)
@given(
    st.sampled_from(["https", "s3", "hf", "postgres+x"]),
    st.sampled_from(["", "user", "a.b", "me%40x"]),
    st.tuples(PASSWORDS, st.just("canary"), PASSWORDS).map("".join),
    st.sampled_from(["host", "10.0.0.1:8080", "[::1]:80", "a.b.c"]),
    st.sampled_from(["", "/", "/x/y", "/x@y", "/x?a=b@c#d"]),
    st.sampled_from(["{}", "'{}'", '"{}"', "where: {}\n  why: it is gone", '{{"url":"{}","n":1}}']),
)
@example("https", "u", "p@s@canary/s@x", "host", "/x", "{}")
@example("https", "u", "canary@123/4", "host", "/x", "{}")
@example("https", "", "0canary')", "host", "", "{}")
@example("s3", "u", "a'canary',b", "host", "", "'{}'")
def test_a_password_in_a_url_leaves_nothing_in_a_message(
    scheme: str, user: str, password: str, host: str, path: str, around: str
) -> None:
    assume(not re.match(r"\d{1,5}[/?#\"'<>]", password))  # a port, for all who read URLs
    url = f"{scheme}://{user}:{password}@{host}{path}"
    text = redacted(around.format(url))
    assert "canary" not in text
    assert text.startswith(around.partition("{}")[0].replace("{{", "{"))
    assert names_credentials(url)
    with pytest.raises(UsageError) as refused:
        refuse_secrets(url)
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize("word", ["https://u:{}@h/x", "https:/u:{}@h/x", "--to=s3://u:{}@h"])
@pytest.mark.parametrize(
    "command",
    [
        *("tokenize", "verify", "mix", "show", "stats", "import", "push", "pull", "export"),
        *("add", "doctor", "report", "status", "train-tokenizer", "no-such-command"),
    ],
)
def test_no_command_repeats_a_password_that_is_typed(
    command: str, word: str, held: None, olm: Olm
) -> None:
    typed = word.format("p@canary@7/tail'q")
    for given_words in (
        (typed,),
        (typed, "-o", typed),
        ("-o", typed),
        ("--tokenizer", typed, "README"),
    ):
        said = olm(command, *given_words)
        assert said.returncode
        assert "canary" not in said.stdout + said.stderr
        assert "tail" not in said.stdout + said.stderr


@pytest.mark.parametrize("word", ["https://u:{}@h/x", "-o=s3://u:{}@h", "hf://:{}@h:80"])
@pytest.mark.parametrize("between", [" ", "\t", "', ", '"} ', " @", "@ ", "\n", "12 /"])
def test_a_password_that_is_typed_may_have_blanks_and_quotes(word: str, between: str) -> None:
    typed = word.format(f"canary{between}tailpart")
    redaction.hold_typed([typed])
    try:
        for text in (typed, f"there is no file '{typed}', or {typed!r}; fix: write x@y.z"):
            assert not {"canary", "tailpart"} & set(re.split("[^a-z]", redacted(text)))
    finally:
        redaction.hold_typed([])
    assert names_credentials(typed)


def test_addresses_with_ports_and_paths_with_an_at_stay() -> None:
    for text in (
        *("http://localhost:8080/a@b", "hf://datasets/a/b@main/x", "s3://b/part-0@2.parquet"),
        '{"url":"https://x.com","mail":"me@x.com"}',
        '{"url":"https://x.com:443","mail":"me@x.com"}',
        *("https://x.com, or mail me@x.com", "10:30 a@b and c:/x@y"),
    ):
        assert redacted(text) == text
        assert redacted(f"'{text}'") == f"'{text}'"


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_s3_a_held_credential_is_found_in_any_spelling(held: None, spelling: str) -> None:
    for secret in SECRETS:
        text = f"the store said {SPELLINGS[spelling](secret)} and closed"
        assert leaked(redacted(text)) is None
        assert redacted(text) == "the store said *** and closed"


def test_s3_credentials_of_the_environment_and_of_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMET_API_KEY", "canary0123456789")
    monkeypatch.setenv("DATABASE_PASSWORD", "two canary words")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:canary-of-proxy@proxy:3128")
    said = redacted("a canary0123456789, b two canary words, c canary-of-proxy refused")
    assert said == "a ***, b ***, c *** refused"


def test_s3_ordinary_text_and_paths_stay(held: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/somewhere/else/token")
    monkeypatch.setenv("MAX_TOKEN_COUNT", "100000000")
    text = (
        "made s3://bucket/tokens: 100000000 tokens from /var/run/somewhere/else/token\n"
        "  basic authorization of a bearer; digest 0123456789abcdef0123456789abcdef"
    )
    assert redacted(text) == text
    assert not names_credentials("s3://bucket/prefix/a=b/part-0@2.parquet")
    assert not echoes({"Contents": [{"Key": f"part-{n:05}-of-1000.jsonl"} for n in range(1000)]})


def test_s3_an_answer_that_repeats_a_credential_is_known(held: None) -> None:
    for secret in SECRETS:
        assert echoes({"Contents": [{"Key": f"in/{secret}.jsonl"}]})
        assert echoes(f'{{"text": "{secret}"}}'.encode())
        assert echoes(b" " * 200_000 + secret.encode())


def test_s3_redaction_comes_before_every_cut(held: None) -> None:
    for most in range(1, 120):
        assert leaked(words("x" * 40 + " " + TOKEN, most)) is None
        assert leaked(said_by(ValueError("x" * 40 + " " + TOKEN), most)) is None
        url = "https://canaryuser:" + "canarypass" * 9 + "@host/path"
        assert "canary" not in words(url, most)


def test_s3_an_error_holds_no_credential_whoever_shows_it(held: None) -> None:
    error = UsageError(TOKEN, where=TOKEN, why=TOKEN.upper(), fix=f"x {TOKEN}")
    assert leaked(f"{error}{error!r}{vars(error)}{error.__reduce__()}") is None


def _fail() -> None:
    raise RuntimeError(f"the client said {TOKEN}")


def test_s3_a_worker_sends_no_credential_to_its_parent(held: None) -> None:
    error, trace, _ = attempt(None, 0, _fail)  # type: ignore[arg-type]
    assert "RuntimeError" in trace
    assert leaked(f"{trace}{error}") is None


SINKS = """
import gc, logging, sys, threading, warnings
sys.path.insert(0, "tests")
from support.hostile_s3 import TOKEN, SPELLINGS
from olm_data.redaction import hold
from olm_data.sinks import guard
guard(); guard()
hold(TOKEN)
said = SPELLINGS["url"](TOKEN)
own = logging.StreamHandler(sys.stdout)
log = logging.getLogger("a.library"); log.addHandler(own)
log.warning("one %s", said)
log.warning("a bad format %d", said)
try:
    raise ValueError(said)
except ValueError:
    log.exception("two")
warnings.warn("three " + said)
def fails():
    raise KeyError(said)
thread = threading.Thread(target=fails); thread.start(); thread.join()
class Late:
    def __del__(self):
        raise OSError(said)
Late(); gc.collect()
raise RuntimeError("four " + said)
"""


def test_s3_every_sink_of_a_process_is_redacted(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SINKS],
        cwd=repository,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    for sign in ("one ***", "two", "three ***", "KeyError", "OSError", "RuntimeError: four ***"):
        assert sign in said, said
    assert leaked(said) is None
    assert done.returncode == 1


def test_s3_importing_the_packages_changes_no_hook_of_the_host(repository: Path) -> None:
    program = (
        "import logging, sys, threading, warnings\n"
        "def hooks():\n"
        "    return (sys.excepthook, sys.unraisablehook, threading.excepthook,\n"
        "            logging.getLogRecordFactory(), warnings.formatwarning,\n"
        "            logging.Handler.handleError)\n"
        "before = hooks()\n"
        "import olm_data.cli, olm_data.sinks, olm_data.storage.s3, olm_train.run\n"
        "assert hooks() == before\n"
        "olm_data.sinks.guard()\n"
        "assert not set(hooks()) & set(before)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=repository, env=environment(), check=True)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("http://storage.example:9000", True),
        ("http://10.0.0.7", True),
        ("http://[2001:db8::1]:9000", True),
        ("http://me:canary-password@10.0.0.8/", True),
        ("http://localhost.example", True),
        ("http://127.0.0.1.example", True),
        ("http://127.0.0.1:9000", False),
        ("http://127.8.0.1", False),
        ("http://[::1]:9000", False),
        ("http://localhost:9000", False),
        ("https://storage.example", False),
    ],
)
def test_s9_an_address_in_clear_is_said_once(
    address: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="olm_data"):
        for _ in range(3):
            warn_plaintext(address)
    assert len(caplog.records) == told
    assert not told or "is not encrypted" in caplog.text
    assert "canary" not in caplog.text


def test_an_error_of_the_user_is_still_whole() -> None:
    error = InputError("there is no such file", where="s3://bucket/a.jsonl", fix="check the path")
    assert str(error).splitlines()[1:] == ["  where: s3://bucket/a.jsonl", "  fix: check the path"]


@pytest.mark.parametrize(
    "text", ["x", "secret", "?secret", "access-key", "://a", "token-", "://a:b", "://@"]
)
def test_s3_a_long_text_is_redacted_in_linear_time(text: str) -> None:
    long = "?" + text * (200_000 // len(text))
    begun = time.process_time()
    redacted(long)
    assert time.process_time() - begun < 5  # quadratic: minutes


def test_threads_that_make_clients_disturb_none_that_looks_for_echoes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redaction, "_held", {f"credential {n}" for n in range(300)})
    race(lambda n: hold(f"another {n}"), lambda _: echoes(b"x" * (1 << 17)), rounds=20_000)


def test_threads_that_change_the_environment_disturb_none_that_redacts() -> None:
    def change(_: int) -> None:
        os.environ["OLM_TEST_OF_REDACTION"] = "1"
        del os.environ["OLM_TEST_OF_REDACTION"]

    race(change, lambda _: redacted("a line"), lambda _: redacted("another"), rounds=20_000)
