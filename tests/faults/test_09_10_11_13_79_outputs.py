"""FAULTS rows 9 to 11, 13, 79: outputs with two writers, unsure stores, or no place for one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.command import olm_data
from support.inline_runner import Around, Never
from support.store_proxy import Exchange, Fault, Proxy, answer, ignore_condition, passing
from support.tokenizing import digests, make_dataset, texts, write_jsonl

from olm_data.cli import cli
from olm_data.errors import ConflictError, ResourceError, StorageError, UsageError
from olm_data.storage.exclusive import exclusive
from olm_data.storage.store import Store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "a.jsonl", texts(40))


def test_09_a_second_command_is_refused_while_the_first_one_works(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    second: list[subprocess.CompletedProcess[str]] = []
    words = ("tokenize", source, "--tokenizer", tiny_tokenizer, "--output", tmp_path / "out")
    meanwhile = Around(lambda: second.append(olm_data(*words)))
    made = make_dataset([source], tiny_tokenizer, tmp_path / "out", runner=meanwhile)
    assert second[0].returncode == 7
    assert "another process is writing" in second[0].stderr
    assert "--output" in second[0].stderr
    assert made.manifest.totals.documents == 40


def test_09_a_dead_writers_lease_does_not_stand_in_the_way(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    pid = os.fork()
    if pid == 0:
        with exclusive(Store(str(tmp_path / "out"))):
            os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "out" / ".lease-000001.json").exists()
    make_dataset([source], tiny_tokenizer, tmp_path / "out")
    assert not list((tmp_path / "out").glob(".lease-*"))


def test_09_a_manifest_that_appeared_meanwhile_is_never_replaced(
    source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    # Another machine finishes first, past the lock of this one.
    store = Store(str(tmp_path / "out"))
    rival = Around(after=lambda: store.create("manifest.json", b"theirs"))
    with pytest.raises(ConflictError, match="already written"):
        make_dataset([source], tiny_tokenizer, tmp_path / "out", runner=rival)
    assert (tmp_path / "out" / "manifest.json").read_bytes() == b"theirs"


def test_10_a_single_writer_still_refuses_what_it_can_see(
    proxy: Proxy, source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    output = f"s3://{proxy.server['bucket']}/{tmp_path.name}"
    rival = Around(after=lambda: Store(output).put("manifest.json", b"theirs"))
    with pytest.raises(ConflictError):
        make_dataset([source], tiny_tokenizer, output, single_writer=True, runner=rival)
    assert Store(output).read("manifest.json") == b"theirs"


@pytest.mark.slow
def test_10_the_option_works_from_the_command_line(
    proxy: Proxy, source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    output = f"s3://{proxy.server['bucket']}/{tmp_path.name}"
    proxy.inject(ignore_condition, conditional=True, times=None)
    command = ("tokenize", source, "--tokenizer", tiny_tokenizer, "--output", output)
    refused = olm_data(*command, "--workers", "1", "--encoder", "hf")
    assert refused.returncode == 6, refused.stderr
    assert "add --single-writer" in refused.stderr
    done = olm_data(*command, "--workers", "1", "--encoder", "hf", "--single-writer")
    assert done.returncode == 0, done.stderr


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
    source: Path,
    tiny_tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rejecting_checksums(exchange: Exchange) -> None:
        """A store that does not know the header."""
        known = [name.lower() for name in exchange.handler.headers]
        (reject if "x-amz-checksum-crc32" in known else passing)(exchange)

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
    assert made.manifest.totals.documents == 40
    assert Store(output).exists("manifest.json")


@pytest.mark.parametrize("output", ["file/out", "file", "/proc/out", "/sys/out"])
def test_13_an_output_that_cannot_be_a_folder_is_refused_at_once(
    output: str, source: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(ResourceError) as caught:
        make_dataset([source], tiny_tokenizer, tmp_path / output, runner=Never())
    assert output in str(caught.value.where)
    assert caught.value.fix


def test_13_a_folder_without_permission_is_refused_at_once(
    source: Path, tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # nobody may not start root's interpreter, which tries the tokenizer out
    monkeypatch.setattr("olm_data.tokenizer.tokenizer.probe", lambda *_: None)
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    pid = os.fork()  # root may write anywhere, so the attempt is made as nobody
    if pid == 0:
        code = 1
        try:
            for parent in [tmp_path, *tmp_path.parents]:
                if parent.stat().st_uid == os.getuid() and parent.name.startswith("pytest-of"):
                    parent.chmod(0o755)
            os.chmod(tiny_tokenizer.parent, 0o755)
            for parent in tmp_path.parents[:2]:
                os.chmod(parent, 0o755)
            os.chmod(tmp_path, 0o755)
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            make_dataset([source], tiny_tokenizer, closed / "out", runner=Never())
        except ResourceError as error:
            code = 5 if "not allowed" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


@pytest.mark.parametrize("place", ["", "/", "~", ".", "own"])
def test_79_nothing_is_written_changed_or_deleted(
    place: str, source: Path, tmp_path: Path, tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "own").mkdir(parents=True)
    (home / "own" / "thesis.tex").write_text("mine")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    before, root = digests(home), sorted(os.listdir("/"))
    output = os.path.expanduser(place)
    words = ["tokenize", str(source), "--tokenizer", str(tiny_tokenizer), "--encoder", "hf"]
    refused = CliRunner().invoke(cli, [*words, "--workers", "1", "--output", output])
    assert isinstance(refused.exception, UsageError), refused.output
    assert (digests(home), sorted(os.listdir("/"))) == (before, root)
