"""FAULTS row 11: a store that rejects the default checksums is met with the setting that helps."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.store_proxy import Exchange, Fault, Proxy, answer, passing
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.errors import StorageError
from olm_data.storage.store import Store

WORDS = "x-amz-checksum-crc32 is not supported"


@pytest.mark.parametrize(
    ("reject", "single_writer"),
    [
        (answer(400, "InvalidArgument", WORDS), False),
        (answer(501, "NotImplemented", WORDS), True),  # else the condition is taken for unknown
    ],
    ids=["400", "501"],
)
def test_11_the_hint_names_the_setting_and_the_setting_helps(
    reject: Fault,
    single_writer: bool,
    proxy: Proxy,
    tiny_tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rejecting_checksums(exchange: Exchange) -> None:
        """A store that does not know the header."""
        known = [name.lower() for name in exchange.handler.headers]
        (reject if "x-amz-checksum-crc32" in known else passing)(exchange)

    source = write_jsonl(tmp_path / "a.jsonl", texts(20))
    output = f"s3://{proxy.server['bucket']}/{tmp_path.name}"
    proxy.inject(rejecting_checksums, times=None)
    with pytest.raises(StorageError) as caught:
        make_dataset([source], tiny_tokenizer, output, single_writer=single_writer)
    fix = str(caught.value.fix)
    assert "export AWS_REQUEST_CHECKSUM_CALCULATION=when_required" in fix
    assert caught.value.exit_code == 6
    assert [seen.method for seen in proxy.seen].count("PUT") == 1  # the probe, before any work
    name, _, value = fix.split()[1].rstrip(",").partition("=")
    monkeypatch.setenv(name, value)
    made = make_dataset([source], tiny_tokenizer, output, single_writer=single_writer)
    assert made.manifest.totals.documents == 20
    assert Store(output).exists("manifest.json")
