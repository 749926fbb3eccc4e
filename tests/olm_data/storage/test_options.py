"""Options of stores: who gets which, by flag, recipe and argument; their secrets stay so."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from support.command import inside, olm_data
from support.s3 import client
from support.small_datasets import random_shards, write_dataset
from support.store_proxy import Proxy
from support.tokenizing import texts, write_jsonl

import olm_data as library
from olm_data.errors import UsageError
from olm_data.redaction import redacted
from olm_data.storage.bucket import service
from olm_data.storage.objects import VARIABLE, options_for, parse_options, use_options

SECRET = "a-Secret-of-these-Options-7"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")


def test_options_hold_for_the_longest_start_of_a_url() -> None:
    use_options({"profile": "all"})
    use_options({"s3://raw": {"profile": "raw"}, "s3://raw/own": {}, "gs://": {"token": "anon"}})
    found = {
        url: options_for(url)
        for url in (
            *("s3://b/k", "s3://raw", "s3://raw/x", "s3://rawer/x", "s3://raw/own/x", "gs://b"),
        )
    }
    all, raw = {"profile": "all"}, {"profile": "raw"}
    assert list(found.values()) == [all, raw, raw, all, {}, {"token": "anon"}]
    assert options_for("https://host/x") == options_for("/data") == {}


def test_what_was_said_first_stays_where_a_file_says_otherwise() -> None:
    use_options({"profile": "flag"})
    use_options({"profile": "file"}, instead=False)
    assert options_for("s3://b") == {"profile": "flag"}


def test_a_command_line_spells_options_as_pairs_or_as_json() -> None:
    assert parse_options(["profile=lab", "anon=true", 'key={"a": 1}']) == {
        "profile": "lab",
        "anon": True,
        "key": '{"a": 1}',
    }
    assert parse_options(['{"s3://b": {"use_ssl": false}}']) == {"s3://b": {"use_ssl": False}}


@pytest.mark.parametrize("text", [f'{{"secret": "{SECRET}"', f"[{SECRET}]", f"--{SECRET}=x"])
def test_words_that_spell_none_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options([text])
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"profile": "lab", "s3://b": {}},
        {"https://host": {"headers": {}}},
        {"s3://b": "profile"},
        {"token": object()},
    ],
)
def test_options_that_no_client_would_get_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="storage options cannot be used"):
        use_options(options)


def test_an_option_that_a_client_does_not_know_is_named() -> None:
    options = json.dumps({"endpont_url": "http://127.0.0.1:1", "secret": SECRET, "key": "k"})
    with pytest.raises(UsageError, match="endpont_url") as caught:
        service("s3", options)
    assert SECRET not in str(caught.value)


def test_secrets_among_options_are_known_to_the_redaction() -> None:
    use_options({"client_kwargs": {"aws_secret_access_key": SECRET}, "endpoint_url": "http://h"})
    assert SECRET not in redacted(f"it said {SECRET}, at http://h")
    assert "http://h" in redacted("at http://h")


def _two_places(proxy: Proxy) -> dict[str, Any]:
    server = proxy.server
    given = {"key": server["key"], "secret": server["secret"]}
    bucket = f"s3://{server['bucket']}"
    return {
        f"{bucket}/two/in": given | {"endpoint_url": server["endpoint_url"]},
        f"{bucket}/two/out": given | {"endpoint_url": proxy.url},
    }


@pytest.fixture
def two(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options for two endpoints; the environment leads to neither, and has no credentials."""
    text = b"".join(b'{"text": "%b"}\n' % one.encode() for one in ("one", "two", "three"))
    server = proxy.server
    client(server).put_object(Bucket=server["bucket"], Key="two/in/a.jsonl", Body=text)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    proxy.clear()
    return _two_places(proxy)


def test_one_command_reads_at_one_endpoint_and_writes_at_another(
    two: dict[str, Any], proxy: Proxy, tiny_tokenizer: Path
) -> None:
    place = f"s3://{proxy.server['bucket']}/two"
    given = ["--storage-options", json.dumps(two)]
    words = ["--tokenizer", str(tiny_tokenizer), "--encoder", "hf", "--workers", "1"]
    run = olm_data("tokenize", f"{place}/in", *words, "--output", f"{place}/out/t", *given)
    assert run.returncode == 0, run.stderr
    asked = [unquote(seen.path) for seen in proxy.seen]
    assert not any("two/in" in path for path in asked), asked
    assert any("two/out/t/manifest.json" in path for path in asked)
    secret = proxy.server["secret"]
    assert secret not in run.stdout + run.stderr
    own = client(proxy.server)
    found = own.list_objects_v2(Bucket=proxy.server["bucket"], Prefix="two/out/t/")["Contents"]
    for item in found:
        data = own.get_object(Bucket=proxy.server["bucket"], Key=item["Key"])["Body"].read()
        assert secret.encode() not in data, item["Key"]
    assert library.Dataset.open(f"{place}/out/t", storage_options=two).documents == 3


def test_a_recipe_and_a_function_take_what_the_flag_takes(
    two: dict[str, Any],
    proxy: Proxy,
    tiny_tokenizer: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    place = f"s3://{proxy.server['bucket']}/two"
    recipe = tmp_path / "recipe.yaml"
    text = write_jsonl(tmp_path / "a.jsonl", texts(5))
    recipe.write_text(
        json.dumps(
            {
                "inputs": [str(text)],
                "tokenizer": str(tiny_tokenizer),
                "output": f"{place}/out/recipe",
                "storage_options": two,
            }
        )
    )
    run = inside(capfd, "tokenize", str(recipe), "--dry-run")
    assert run.returncode == 0, run.stderr
    os.environ[VARIABLE] = ""
    local = tmp_path / "tokens"
    write_dataset(str(local), random_shards(0, [[50] * 4]))
    manifest = {
        "version": 1,
        "seed": 1,
        "sequence_length": 16,
        "sources": {"a": {"data": str(local)}},
        "stages": [{"name": "main", "tokens": 64, "weights": {"a": 1}}],
    }
    (tmp_path / "mix.yaml").write_text(json.dumps(manifest))
    first = library.mix(tmp_path / "mix.yaml")
    second = library.mix(tmp_path / "mix.yaml", overwrite=True, storage_options=two)
    assert first.digest == second.digest
    assert options_for(f"{place}/out/x") == two[f"{place}/out"]
