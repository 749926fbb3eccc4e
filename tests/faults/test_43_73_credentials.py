"""FAULTS rows 43 and 73: no credential in any output, also where a store echoes it or redirects."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.command import Said, inside, olm_data
from support.hostile_s3 import (
    SECRETS,
    SPELLINGS,
    TOKEN,
    Answer,
    Hostile,
    broken_headers,
    data,
    denied,
    error,
    field,
    hostile_s3,
    leaked,
    listing,
    no_xml,
    nonsense,
    profile,
    redirect,
)
from support.store_proxy import Proxy, answer
from support.tokenizing import texts, write_jsonl

from olm_data.errors import StorageError, UsageError, redacted
from olm_data.storage import bucket as under_test
from olm_data.storage.bucket import Backoff
from olm_data.storage.store import Store

CANARIES = {
    "AWS_SECRET_ACCESS_KEY": "canary-wrong-secret-key",
    "AWS_SESSION_TOKEN": "canary-session-token",
    "HF_TOKEN": "hf_canarycanarycanary",
    "WANDB_API_KEY": "canary-api-key-of-another-tool",
}


URLS = [
    "s3://canary-user:canary-password@bucket/x",
    "s3://canary-password@bucket/x",
    "s3://bucket/x?X-Amz-Credential=canary-credential&X-Amz-Signature=canary-signature",
    "s3://bucket/x?AWSAccessKeyId=canary-key&Signature=canary-signature",
    "https://bucket.s3.amazonaws.com/x?X-Amz-Security-Token=canary-token",
    "https://canary-user:canary-password@host/x",
]


@pytest.mark.slow
@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_43_no_command_prints_or_stores_a_secret_of_the_environment(
    debug: list[str],
    s3: dict[str, str],
    tiny_tokenizer: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(20))
    output = f"s3://{s3['bucket']}/{tmp_path.name}"
    words = ("--tokenizer", tiny_tokenizer, "--encoder", "hf", "--workers", "1", "--output")

    def run(extra: dict[str, str], *command: str | Path) -> Said:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in extra.items():
                patch.setenv(name, value)
            return inside(capsys, *debug, *command)

    good = {name: CANARIES[name] for name in ("HF_TOKEN", "WANDB_API_KEY")}
    dead = CANARIES | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9/?X-Amz-Signature=canary-signature"}
    with_user = CANARIES | {"AWS_ENDPOINT_URL": "http://canary-user:canary-pass@127.0.0.1:9"}
    runs = [
        olm_data(*debug, "tokenize", source, *words, output, extra=good),
        run(good, "verify", output),
        run(CANARIES, "tokenize", source, *words, f"{output}/2"),
        run(dead, "tokenize", f"{output}/in/a.jsonl", *words, output),
        run(with_user, "doctor", output),
        run(CANARIES, "verify", output),
    ]
    assert [run.returncode for run in runs] == [0, 0, 6, 6, 2, 6], [r.stderr for r in runs]
    everything = "".join(run.stdout + run.stderr for run in runs)
    assert "canary" not in everything
    assert s3["secret"] not in everything
    for entry in Store(output).entries():
        data = Store(output).read(entry.name)
        assert b"canary" not in data
        assert s3["secret"].encode() not in data


@pytest.mark.parametrize("url", URLS)
def test_43_a_url_that_holds_credentials_is_refused_without_repeating_them(
    url: str, tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        Store(url)
    assert "canary" not in str(caught.value)
    source = write_jsonl(tmp_path / "a.jsonl", texts(2))
    words = ("--tokenizer", tiny_tokenizer, "--output")
    for debug in ([], ["--debug"]):
        for command in ((source, *words, url), (url, *words, tmp_path / "out")):
            run = inside(capsys, *debug, "tokenize", *command)
            assert run.returncode == 2, run.stderr
            assert "canary" not in run.stdout + run.stderr
    assert not (tmp_path / "out").exists()


def test_43_what_the_store_says_is_shown_without_secrets(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = proxy.server["secret"]
    message = f"see http://host/?X-Amz-Signature=canary-signature and {secret}"
    proxy.inject(answer(403, "AccessDenied", message.replace("&", "&amp;")), times=None)
    with pytest.raises(Exception, match="AccessDenied") as caught:
        Store(f"s3://{proxy.server['bucket']}/{tmp_path.name}").put("a", b"x")
    said = redacted(str(caught.value))
    assert "canary" not in said
    assert secret not in said


Mode = Callable[[str], Answer]


REFUSALS: dict[str, Mode] = {
    "denied": denied,
    "error 403": lambda words: error(403, words),
    "error 503": lambda words: error(503, words),
    "no XML": no_xml,
    "broken headers": broken_headers,
}


ANSWERS: dict[str, Mode] = {"listing": listing, "data": data, "field": field, "nonsense": nonsense}


REDIRECTS: dict[str, Mode] = {str(code): redirect(code) for code in (301, 302, 303, 307, 308)}


OPERATIONS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read("a"),
    "size": lambda store: store.size("a"),
    "entries": lambda store: store.entries(),
    "put": lambda store: store.put("a", b"x"),
    "create": lambda store: store.create("a", b"x"),
    "delete": lambda store: store.delete("a"),
    "uploads": lambda store: list(store.bucket.uploads("")),
    "clock": lambda store: store.bucket.now(),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Hostile]:
    with hostile_s3() as hostile:
        yield hostile


@pytest.fixture
def hostile(server: Hostile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hostile:
    """The server, and this process with a profile that leads to it and no other credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in profile(tmp_path, server.url).items():
        monkeypatch.setenv(name, value)
    for name in ("BACKOFF", "FIRST_CONTACT"):
        monkeypatch.setattr(under_test, name, Backoff(attempts=2, first=0.001, most=0.002))
    server.seen.clear()
    return server


def told(action: Callable[[], object]) -> str:
    """Return all that an error and its chain say; "" where there is none."""
    try:
        return repr(action())
    except Exception as caught:
        parts = [str(caught), repr(caught), repr(vars(caught))]
        chain = traceback.TracebackException.from_exception(caught, capture_locals=False)
        return "\n".join([*parts, *chain.format()])


@pytest.mark.parametrize("mode", [*REFUSALS, *ANSWERS, *REDIRECTS])
@pytest.mark.parametrize(
    "spellings", [["url"], pytest.param([*SPELLINGS], marks=pytest.mark.slow)], ids=len
)
def test_73_no_error_result_or_log_holds_a_credential_that_the_store_echoes(
    spellings: list[str], mode: str, hostile: Hostile, caplog: pytest.LogCaptureFixture
) -> None:
    hostile.answer = (REFUSALS | ANSWERS | REDIRECTS)[mode]
    for spelling in spellings:
        spell = SPELLINGS[spelling]
        hostile.words = " ".join(["see", *map(spell, SECRETS), "end"])
        with caplog.at_level(logging.WARNING, logger="olm_data"):
            for name, operation in OPERATIONS.items():
                found = told(lambda operation=operation: operation(Store("s3://b/in")))
                assert leaked(found) is None, (spelling, name, found)
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("olm_data")]
    assert leaked("\n".join(ours)) is None


def test_73_the_check_itself_finds_every_spelling() -> None:
    for spelling, spell in SPELLINGS.items():
        assert leaked(f"before {spell(TOKEN)} after"), spelling
    assert leaked("an ordinary sentence, 0123456789 and s3://bucket/key") is None


@pytest.mark.parametrize("mode", ["denied", "field", "broken headers", "302"])
def test_73_no_command_prints_a_credential_and_debug_prints_none_either(
    mode: str, hostile: Hostile, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hostile.answer = (REFUSALS | ANSWERS | REDIRECTS)[mode]
    hostile.words = " ".join(SECRETS)
    for words in (("verify", "s3://b/in"), ("--debug", "stats", "s3://b/in", "--json")):
        run = inside(capfd, *words)
        assert run.returncode == 6, run.stderr
        assert leaked(run.stdout + run.stderr) is None, run.stderr


def test_73_a_process_of_its_own_prints_and_writes_no_credential(
    hostile: Hostile, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    words = ("--tokenizer", tiny_tokenizer, "--encoder", "hf", "--workers", "1", "--output", output)
    hostile.words = " ".join(SECRETS)
    for mode in (listing, broken_headers):
        hostile.answer = mode
        run = olm_data("--debug", "tokenize", "s3://b/in/", *words, extra=dict(_aws(hostile)))
        assert run.returncode == 6, run.stderr
        assert "Traceback" in run.stderr
        assert leaked(run.stdout + run.stderr) is None, run.stderr
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "credentials":
            assert leaked(path.read_bytes().decode("latin-1")) is None, path


def _aws(hostile: Hostile) -> Iterator[tuple[str, str]]:
    import os

    yield from ((k, v) for k, v in os.environ.items() if k.startswith("AWS_"))


def test_73_the_stores_own_words_are_cut_to_80_characters_after_redaction(hostile: Hostile) -> None:
    hostile.answer = denied
    hostile.words = "x" * 70 + " " + TOKEN + " \u202e" + "y" * 500
    with pytest.raises(StorageError) as caught:
        Store("s3://b/in").put("a", b"x")
    why = caught.value.why or ""
    assert why.startswith("x" * 70 + " ***")
    assert len(why) == 80
    assert leaked(why) is None
    hostile.words = "the bucket \u202e is \x85 closed today"
    with pytest.raises(StorageError) as caught:
        Store("s3://b/in").put("a", b"x")
    assert caught.value.why == r"the bucket \u202e is \x85 closed today"


@pytest.mark.parametrize(
    ("command", "code"), [("verify", 301), ("doctor", 302), ("verify", 307), ("doctor", 308)]
)
def test_73_s8_a_redirect_is_told_in_one_sentence_and_not_followed(
    command: str, code: int, hostile: Hostile, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile.answer, hostile.words = redirect(code), "elsewhere"
    run: Said = inside(capsys, command, "s3://b/in")
    assert run.returncode == 6, run.stderr
    said = run.stdout + run.stderr
    assert f"the store redirects to another address: {code}" in said
    assert "Traceback" not in said
    assert "AWS_ENDPOINT_URL" in said
    # Each operation once: nothing asks for the bucket's region, or again.
    assert len(hostile.seen) <= 2, hostile.seen
    assert {path.partition("?")[0].split("/")[1] for _, path in hostile.seen} == {"b"}


def test_73_s8_a_303_is_a_redirect_too(hostile: Hostile) -> None:
    hostile.answer, hostile.words = redirect(303), "elsewhere"
    with pytest.raises(StorageError, match="redirects to another address: 303"):
        Store("s3://b/in").read("a")
    assert len(hostile.seen) == 1


def test_73_s8_a_redirect_that_names_a_region_is_not_followed_off_aws(hostile: Hostile) -> None:
    hostile.words = "words"
    hostile.answer = lambda words: error(307, words, **{"x-amz-bucket-region": "eu-west-1"})
    with pytest.raises(StorageError, match="redirects"):
        Store("s3://b/in").read("a")
    assert len(hostile.seen) == 1
