"""Promises of `olm-data doctor`: it finds by trying what would stop a run, and leaves nothing."""

from __future__ import annotations

import hashlib
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.command import Olm, olm_data
from support.store_proxy import Exchange, Fault, Proxy, answer, ignore_condition, passing, reset

from olm_data.errors import UsageError
from olm_data.extensions.doctor.doctor import PlaceFinding, clean, examine, parse_age
from olm_data.storage.bucket import Bucket
from olm_data.storage.lease import LONGEST_TAKEOVER
from olm_data.storage.store import Store


def findings(place: str) -> dict[str, PlaceFinding]:
    return {finding.check: finding for finding in examine(place).findings}


@pytest.mark.parametrize("cloud", ["s3", "gs", "az"], indirect=True)
def test_a_good_store_passes_every_check_and_nothing_is_left(
    cloud: dict[str, str], tmp_path: Path
) -> None:
    place = f"{cloud['kind']}://{cloud['bucket']}/{tmp_path.name}"
    done = olm_data("doctor", place, "--json")
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    states = {item["check"]: item["state"] for item in report["findings"]}
    assert report["ok"] is True
    wanted = "address, clock, write, read, list, throughput, delete, room, open files"
    wanted += ", conditional create, conditional replace, conditional delete"
    of_s3 = ", checksums, multipart" if cloud["kind"] == "s3" else ""
    assert set(states) == set((wanted + of_s3).split(", "))
    del states["room"], states["open files"]
    if cloud["kind"] == "gs":  # fake-gcs-server knows no condition of a delete; Google does
        assert states.pop("conditional delete") == "note"
    assert set(states.values()) == {"ok"}
    seen = {item["check"]: item["seen"] for item in report["findings"]}
    assert seen.get("checksums", "") == ("accepted; ETags are md5" if of_s3 else "")
    assert Store(place).entries() == []
    assert list(Store(place).bucket.uploads(tmp_path.name)) == []


@pytest.mark.parametrize(
    ("fault", "chosen", "check", "said"),
    [
        (ignore_condition, {"conditional": True}, "conditional create", "--single-writer"),
        (answer(501, "NotImplemented"), {"conditional": True}, "conditional create", "single"),
        (answer(403, "AccessDenied"), {"method": "PUT"}, "write", "AWS_SECRET_ACCESS_KEY"),
        (answer(404, "NoSuchBucket"), {}, "address", "create it first"),
        (answer(400, "InvalidArgument"), {"method": "PUT"}, "write", "when_required"),
        (answer(403, "SignatureDoesNotMatch"), {}, "address", "AWS_SECRET_ACCESS_KEY"),
        (reset, {}, "address", "AWS_ENDPOINT_URL"),
    ],
)
def test_what_would_stop_a_run_fails_with_the_way_out(
    fault: Fault, chosen: dict[str, str], check: str, said: str, proxy: Proxy, tmp_path: Path
) -> None:
    place = f"s3://{proxy.server['bucket']}/{tmp_path.name}"
    proxy.inject(fault, times=None, **chosen)
    report = examine(place)
    failed = [finding for finding in report.findings if finding.state == "fail"]
    assert [finding.check for finding in failed] == [check]
    assert said in failed[0].fix
    assert report.exit_code == 6
    proxy.clear()
    assert Store(place).entries() == []


def ignores_versions(exchange: Exchange) -> None:
    """The store says that it is done where the version to replace is not there any more."""
    response, data = exchange.forward()
    if response.status not in (404, 412):
        exchange.reply(response, data)
        return
    exchange.handler.send_response_only(200)
    exchange.handler.send_header("ETag", f'"{hashlib.md5(exchange.body).hexdigest()}"')
    exchange.handler.send_header("Content-Length", "0")
    exchange.handler.end_headers()


@pytest.mark.parametrize(
    ("method", "fault", "said"),
    [
        ("PUT", ignores_versions, "ignored"),
        ("PUT", answer(501, "NotImplemented"), "refused"),
        ("DELETE", ignores_versions, "ignored"),
    ],
)
def test_a_store_that_does_not_know_versions_is_noted_and_stops_nobody(
    method: str, fault: Fault, said: str, proxy: Proxy, tmp_path: Path
) -> None:
    check = {"PUT": "conditional replace", "DELETE": "conditional delete"}[method]

    def befalls(exchange: Exchange) -> None:
        (fault if "If-Match" in exchange.handler.headers else passing)(exchange)

    proxy.inject(befalls, method=method, times=None)
    report = examine(f"s3://{proxy.server['bucket']}/{tmp_path.name}")
    found = {finding.check: finding for finding in report.findings}[check]
    assert (report.exit_code, found.state) == (0, "note")
    assert found.seen.startswith(said)


def test_whoever_may_not_delete_hears_of_it_and_can_still_write(
    proxy: Proxy, tmp_path: Path
) -> None:
    proxy.inject(answer(403, "AccessDenied"), method="DELETE", times=None)
    report = examine(f"s3://{proxy.server['bucket']}/{tmp_path.name}")
    assert any("stays" in finding.seen for finding in report.findings)


def test_an_etag_that_is_no_md5_is_noted(proxy: Proxy, tmp_path: Path) -> None:
    def other(exchange: Exchange) -> None:
        response, data = exchange.forward()
        del response.headers["ETag"]
        response.headers["ETag"] = '"not-an-md5"'
        exchange.reply(response, data)

    proxy.inject(other, method="HEAD", times=None)
    found = findings(f"s3://{proxy.server['bucket']}/{tmp_path.name}")
    assert "not md5" in found["checksums"].seen


def test_the_setting_without_checksums_is_noted(
    s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    found = findings(f"s3://{s3['bucket']}/{tmp_path.name}")
    assert (found["checksums"].state, found["multipart"].state) == ("note", "ok")


@pytest.mark.parametrize(("minutes", "state"), [(0, "ok"), (5, "note"), (20, "fail")])
def test_a_clock_that_is_off_is_noted_before_the_store_refuses_it(
    minutes: int, state: str, s3: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shifted = datetime.now(UTC) + timedelta(minutes=minutes)
    monkeypatch.setattr(Bucket, "now", lambda self: shifted)
    assert findings(f"s3://{s3['bucket']}/{tmp_path.name}")["clock"].state == state


def test_a_local_folder_that_does_not_exist_yet_is_examined_and_not_made(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b"
    report = examine(str(place))
    assert report.exit_code == 0
    states = {finding.check: finding.state for finding in report.findings}
    assert states["conditional create"] == states["lock"] == states["write"] == "ok"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", ["https://example.org/x", "hf://datasets/org/name/x"])
def test_a_place_that_can_only_be_read_is_no_output(place: str) -> None:
    with pytest.raises(UsageError, match="can only be read"):
        examine(place)


# What `doctor --clean` takes for a leftover; FAULTS row 12 deletes them.
@pytest.mark.parametrize(
    ("text", "seconds"), [("0s", 0), ("30m", 1800), ("12h", 43_200), ("1d", 86_400)]
)
def test_an_age_has_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "1", "d", "1w", "-1d", "1.5h", "1d ", "1 d", "99999999d"])
def test_what_spells_no_age_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="is not an age") as caught:
        parse_age(text)
    assert "12h" in str(caught.value)


def test_a_name_tells_what_a_file_may_be_and_a_lease_must_be_older_than_a_takeover(
    tmp_path: Path,
) -> None:
    kinds = {
        ".olm-probe-" + "0" * 32: "probe",
        "run/host.json": "heartbeat",
        "plan.json": None,
        "other/run/host.json": None,  # no plan beside it
        "shard-00000.tokens.npy": None,
    }
    for name in kinds:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
        os.utime(tmp_path / name, (0, 0))
    found = clean(str(tmp_path), 1, dry_run=True)
    mine = {item.name: item.kind for item in found.found if item.kind != "scratch"}
    assert mine == {str(tmp_path / name): kind for name, kind in kinds.items() if kind}
    assert LONGEST_TAKEOVER > 1
    assert not found.deleted
    assert len(list(tmp_path.rglob("*.json"))) == 3


def test_a_local_place_that_cannot_be_written_is_exit_5(olm: Olm) -> None:
    shown = olm("doctor", "/proc/x")
    assert shown.returncode == 5
    assert "write  fail " in shown.stdout
