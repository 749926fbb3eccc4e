"""What a file's name tells: format, compression, and how its places are counted."""

from __future__ import annotations

import pytest

from olm_data.errors import InputError
from olm_data.sources.formats import (
    CODECS,
    FORMATS,
    as_array,
    codec_of,
    describe,
    format_of,
    is_json,
    whole_file,
)


@pytest.mark.parametrize("ending", FORMATS)
def test_a_name_tells_its_format_in_any_case_and_packed_where_it_can_be_streamed(
    ending: str,
) -> None:
    kind = FORMATS[ending]
    assert format_of(f"a{ending.upper()}") == kind
    packed = kind if kind in ("jsonl", "csv", "txt", "html", "warc") else None
    assert {format_of(f"a{ending}{codec}") for codec in CODECS} == {packed}


def test_places_are_lines_in_packed_json_lines_and_elements_in_arrays() -> None:
    plain, packed = describe("/a.json", 5, "r"), describe("/a.json.gz", 5, "r")
    assert (plain.position, packed.position) == ("byte", "line")
    assert is_json(plain.url)
    assert is_json(packed.url)
    assert not is_json("a.jsonl")
    assert as_array(packed).position == "row"
    assert as_array(packed).format == "json"


def test_a_packed_file_is_planned_for_more_text_than_it_stores() -> None:
    (plain,), (packed,) = (whole_file(3, describe(name, 100, "")) for name in ("a.txt", "a.txt.xz"))
    assert (plain.input, plain.start, plain.stop, plain.bytes) == (3, 0, 1, 100)
    assert packed.bytes > plain.bytes
    assert whole_file(0, describe("a.txt", 0, ""))[0].bytes == 1


@pytest.mark.parametrize("name", ["a", "a.gz", "a.parquet.gz", "a.exe", "jsonl"])
def test_a_name_that_tells_no_format_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(InputError, match="tells no format") as caught:
        describe(name, 0, "")
    assert ".parquet" in str(caught.value.fix)


def test_only_the_last_ending_names_the_codec() -> None:
    assert codec_of("a.gz.txt") is None
    assert codec_of("A.TXT.ZST") == "zstd"
