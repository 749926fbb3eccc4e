"""The fork server: a forked process that has inherited one starts its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.command import olm_data, python
from support.tokenizing import texts, write_jsonl

from olm_data.runners.fork_server import abandoned_sockets

FORKS = """
import os, sys, traceback
import olm_data
source, output, tokenizer = sys.argv[1:]

def tokenize(name):
    olm_data.tokenize(source, output=output + name, tokenizer=tokenizer, workers=2)

tokenize("-parent")
child = os.fork()
if not child:
    try:
        tokenize("-child")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_tokenizes_after_its_parent_did(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    source = tmp_path / "in.txt"
    source.write_text("some words\n" * 50)
    output = tmp_path / "out"
    words = [sys.executable, "-c", FORKS, str(source), str(output), str(tiny_tokenizer)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "out-parent" / "manifest.json").read_text()
    assert (tmp_path / "out-child" / "manifest.json").read_text()


def test_the_fork_server_ends_with_its_parent_without_taking_its_modules_apart(
    tmp_path: Path,
) -> None:
    (tmp_path / "heavy.py").write_text(
        "import os\n"
        "class Torn:\n"
        "    def __del__(self, write=os.write):\n"
        "        write(2, b'torn apart')\n"
        "os.write(2, b'loaded ')\n"
        "torn = Torn()\n"
    )
    done = python(
        tmp_path,
        """
        from olm_data.runners import fork_server

        if __name__ == "__main__":
            fork_server.start(["heavy"])
        """,
    )
    assert (done.returncode, done.stderr) == (0, "loaded ")  # stderr is open as long as the server


def test_the_fork_server_is_started_before_the_large_libraries_are_imported(tmp_path: Path) -> None:
    done = python(
        tmp_path,
        """
        import sys
        from olm_data.runners import fork_server

        def start(modules):
            large = {"numpy", "pyarrow", "tokenizers", "fsspec", "awkward"}
            print("large:", *sorted(large & set(sys.modules)))
            raise SystemExit(9)

        fork_server.start = start
        sys.argv = ["olm-data", "tokenize", "a.jsonl", "--tokenizer", "gpt2", "--output", "s3://b/o"]
        from olm_data.cli import main
        main()
        """,
    )
    assert (done.returncode, done.stdout) == (9, "large:\n")


def test_a_command_on_local_files_forks_its_workers_and_starts_no_server(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts(9))
    done = python(
        tmp_path,
        f"""
        import multiprocessing, os, sys
        from olm_data.runners import fork_server
        from olm_data.runners.local import _Worker

        def give(worker, task, really=_Worker.give):
            status = open(f"/proc/{{worker.process.pid}}/status").read()
            print(int(status.split("PPid:")[1].split()[0]) == os.getpid())
            really(worker, task)

        _Worker.give = give
        fork_server.start = None
        tokenizer = {str(tiny_tokenizer)!r}
        os.chdir({str(tmp_path)!r})
        sys.argv = ["olm-data", "tokenize", "a.jsonl", "--tokenizer", tokenizer, "--output", "out"]
        from olm_data.cli import main
        main()
        """,
    )
    assert done.returncode == 0, done.stderr
    assert {*done.stdout.splitlines()[:1]} == {"True"}


def test_a_long_name_of_tmpdir_does_not_matter(tmp_path: Path, tiny_tokenizer: Path) -> None:
    folder = tmp_path / ("t" * 120)
    folder.mkdir()
    text = write_jsonl(tmp_path / "a.jsonl", texts(3))
    said = olm_data(
        *("tokenize", text, "--tokenizer", tiny_tokenizer, "-o", tmp_path / "out"),
        extra={"TMPDIR": str(folder)},
    )
    assert (said.returncode, "Traceback" in said.stderr) == (0, False), said.stderr
    assert os.listdir(folder) == []


def test_a_short_tmpdir_keeps_its_sockets(tmp_path: Path) -> None:
    code = (
        "import tempfile; tempfile.tempdir = {0!r}\n"
        "from olm_data.runners.fork_server import own_sockets\n"
        "from multiprocessing.util import get_temp_dir\n"
        "own_sockets(); print(get_temp_dir(), tempfile.gettempdir())"
    )
    for folder, there in ((Path("/tmp"), True), (tmp_path / ("t" * 80), False)):
        folder.mkdir(exist_ok=True)
        words = [sys.executable, "-c", code.format(str(folder))]
        sockets, files = subprocess.check_output(words, text=True).split()
        assert (sockets.startswith(f"{folder}/"), files) == (there, str(folder))
        assert len(sockets) < 70


def test_sockets_that_a_killed_process_left_are_found(tmp_path: Path) -> None:
    code = (
        "import tempfile, os, signal; tempfile.tempdir = {0!r}\n"
        "from olm_data.runners.fork_server import own_sockets\n"
        "own_sockets(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        subprocess.run([sys.executable, "-c", code.format(folder)], check=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", folder)
            (left,) = (path for path in abandoned_sockets() if str(path).startswith(folder))
            assert left.name.startswith("olm-sockets-")
            patch.setattr("socket.gethostname", lambda: "elsewhere")  # its processes are not seen
            assert not [path for path in abandoned_sockets() if str(path).startswith(folder)]


def test_a_process_forked_beside_the_server_can_be_reached_by_a_socket_of_its_own(
    tmp_path: Path,
) -> None:
    done = python(
        tmp_path,
        """
        import multiprocessing
        from multiprocessing.connection import Listener
        from olm_data.runners import fork_server

        def listen():  # as workers of a torch DataLoader do, to hand over tensors
            Listener(family="AF_UNIX").close()

        if __name__ == "__main__":
            fork_server.start(())
            for _ in range(2):
                worker = multiprocessing.get_context("fork").Process(target=listen)
                worker.start()
                worker.join()
                print(worker.exitcode)
        """,
    )
    assert (done.returncode, done.stdout) == (0, "0\n0\n")
