"""Files of the hub: pinned to a commit, listed, refused by name."""

from __future__ import annotations

import pytest
from support.hub_stub import COMMIT, HubStub
from support.reading import read_source, resolve_source

from olm_data.errors import InputError, UsageError
from olm_data.tokenizer.tokenizer import load_tokenizer


def test_files_are_pinned_to_the_commit_that_was_listed(endpoint: HubStub) -> None:
    plan = resolve_source(source="fineweb-edu")
    assert all(f"@{COMMIT}/" in file.url for file in plan.inputs)
    assert all(COMMIT not in file.path for file in plan.inputs)


def test_hub_urls_work_as_inputs(hub: tuple[HubStub, list[str]], endpoint: HubStub) -> None:
    url = "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT"
    assert read_source(f"{url}/001_00000.parquet").texts == hub[1][60:]
    assert read_source(f"{url}/*.parquet").texts == hub[1]
    assert read_source(url).texts == hub[1]


def test_what_is_not_on_the_hub_is_refused_by_name(endpoint: HubStub) -> None:
    for arguments in (
        {"source": "fineweb"},
        {"source": "fineweb-edu", "subset": "CC-MAIN-2024-10"},
        {"source": "hf:nobody/nothing"},
        {"inputs": ["hf://datasets/nobody/nothing/a.parquet"]},
        {"inputs": ["hf://datasets/HuggingFaceFW/fineweb-edu/no-*.parquet"]},
    ):
        with pytest.raises(InputError):
            resolve_source(**arguments)
    with pytest.raises(UsageError, match="neither a local path nor a hub repository"):
        load_tokenizer("nobody/nothing")
