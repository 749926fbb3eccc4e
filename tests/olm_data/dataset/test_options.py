"""Options on disk: those always told, those in use, and what cannot be is refused."""

from __future__ import annotations

import msgspec
import pytest

from olm_data.dataset.inputs import ReadOptions, RecordOptions
from olm_data.dataset.options import ImportedOptions, Options, decode_options

ALWAYS = {"text_column": "text", "id_column": None, "keep": [], "separator": None}


def stored(options: RecordOptions) -> dict[str, object]:
    return msgspec.json.decode(msgspec.json.encode(options))


def test_an_option_that_is_not_in_use_is_left_out_however_its_value_was_made() -> None:
    plain = Options(on_invalid="".join("skip"), container="".join("npy"), seed=5)
    assert stored(plain) == ALWAYS | {"holdout": "0"}
    assert stored(Options(sample="1/2"))["seed"] == 0
    assert stored(Options(shuffle_documents=True, seed=3))["seed"] == 3
    assert stored(Options(container="raw"))["container"] == "raw"


def test_to_stop_at_invalid_text_is_not_recorded_and_batches_are_of_the_reading_alone() -> None:
    read = ReadOptions(on_invalid="error", batch_bytes=7)
    assert stored(read.recorded) == ALWAYS | {"batch_bytes": 7}
    assert stored(msgspec.convert(read.recorded, RecordOptions, from_attributes=True)) == ALWAYS
    assert read.on_invalid == "error"


def test_a_manifest_holds_options_of_tokenising_or_the_format_it_was_imported_from() -> None:
    assert decode_options(msgspec.Raw(b'{"imported": "megatron"}')) == ImportedOptions("megatron")
    known = decode_options(msgspec.Raw(b'{"text_column": "body", "of_a_later_release": 1}'))
    assert known == Options(text_column="body")


@pytest.mark.parametrize(
    "data", [b'{"imported": 3}', b'{"imported": "x", "more": 1}', b'{"text_column": "a\\u001b"}']
)
def test_options_that_cannot_be_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expected|unknown field|control"):
        decode_options(msgspec.Raw(data))
