"""FAULTS row 43: credentials never get into output, manifests, plans, logs or tracebacks."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import Said, inside, olm_data
from support.store_proxy import Proxy, answer
from support.tokenizing import texts, write_jsonl

from olm_data.errors import UsageError, redacted
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
