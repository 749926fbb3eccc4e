"""Several clouds in one run, and what can only be read: each on a real server."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clouds import environment
from support.command import olm_data
from support.hf_models import hf_model
from support.hub_stub import HubStub
from support.quiet_server import QuietHandler, QuietServer, serving
from support.runs import build_trainer, make_mixture, metrics, same_bits
from support.tokenizing import digests, make_dataset, texts, write_jsonl

from olm_data.dataset.dataset import Dataset
from olm_data.errors import InputError, StorageError, UsageError
from olm_data.storage.store import Store
from olm_train import Decoder, load_model


@pytest.fixture
def clouds(
    gs_server: dict[str, str],
    az_server: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[str, str]:
    """Prefixes of this test's own at Google and at Azure."""
    for server in (gs_server, az_server):
        for name, value in environment(server["kind"], server["endpoint_url"]).items():
            monkeypatch.setenv(name, value)
    gs, az = (f"{s['kind']}://{s['bucket']}/{tmp_path.name}" for s in (gs_server, az_server))
    return gs, az


def train(lock: Path, save: str, work: Path) -> None:
    build_trainer(
        lock,
        save,  # type: ignore[arg-type]
        "--trainer.callbacks.lm_evaluator.enabled=false",
        "--trainer.hard_stop={value: 4, unit: steps}",
        f"--trainer.work_dir={work}",
        f"--data_loader.cache.folder={work}/cache",
    ).fit()


def test_a_mixture_whose_sources_lie_on_two_clouds_trains_as_one_on_disk(
    clouds: tuple[str, str], tiny_mixture: Path, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    gs, az = clouds
    places = {"prose": f"{gs}/prose", "code": f"{az}/code"}
    lock = make_mixture(tmp_path, tiny_tokenizer, places)
    assert f"{gs}/prose" in lock.read_text()
    assert f"{az}/code" in lock.read_text()
    train(lock, f"{az}/run", tmp_path / "far")
    train(tiny_mixture, str(tmp_path / "near"), tmp_path / "near")
    assert metrics(tmp_path / "far") == metrics(tmp_path / "near")
    assert Store(f"{az}/run").read("latest") == b"step00000004\n"


@pytest.mark.slow
def test_workers_of_their_own_write_from_one_cloud_to_another_what_one_writes_to_disk(
    clouds: tuple[str, str], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    gs, az = clouds
    source = write_jsonl(tmp_path / "a.jsonl", texts(80))
    Store(f"{gs}/in").put("a.jsonl", source.read_bytes())
    common = ("--tokenizer", tiny_tokenizer, "--shard-tokens", "1500", "--workers", "2")
    local = olm_data("tokenize", source, *common, "--output", tmp_path / "local")
    far = olm_data("tokenize", f"{gs}/in", *common, "--output", f"{az}/out")
    assert (local.returncode, far.returncode) == (0, 0), far.stderr
    names = [name for name in digests(tmp_path / "local") if name.endswith(".npy")]
    assert names
    store = Store(f"{az}/out")
    assert {name: store.sha256(name) for name in names} == {
        name: hashlib.sha256((tmp_path / "local" / name).read_bytes()).hexdigest() for name in names
    }
    assert olm_data("verify", f"{az}/out").returncode == 0
    assert olm_data("doctor", f"{az}/out", "--clean", "--dry-run").returncode == 0


def test_a_process_that_forks_makes_its_own_connections(clouds: tuple[str, str]) -> None:
    for url in clouds:
        store = Store(url)
        store.put("a", b"x")
        pid = os.fork()
        if pid == 0:
            os._exit(0 if store.read("a") == b"x" else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert store.read("a") == b"x"


def test_a_forked_process_ends_as_any_other(clouds: tuple[str, str], repository: Path) -> None:
    script = (
        "import os, sys\nfrom olm_data.storage.store import Store\n"
        "stores = [Store(url) for url in sys.argv[1:]]\n"
        "[store.put('a', b'x') for store in stores]\n"
        "pid = os.fork()\nassert all(store.read('a') == b'x' for store in stores)\n"
        "if pid: assert os.waitpid(pid, 0)[1] == 0\n"
    )
    import subprocess

    done = subprocess.run(
        [sys.executable, "-c", script, *clouds],
        env=os.environ | {"PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


class _Files(QuietServer):
    """A web server with ranges, unless told otherwise."""

    data = b""
    ranges = True


@pytest.fixture
def web() -> Iterator[tuple[_Files, str]]:
    class Handler(QuietHandler):
        def _serve(self) -> None:
            data, status, extra = server.data, 200, {}
            tag = f'"{hashlib.md5(data).hexdigest()}"'
            if not self.path.startswith("/a.jsonl"):
                data, status = b"", 404
            elif self.headers.get("If-Match", tag) != tag:
                data, status = b"", 412
            elif server.ranges and "Range" in self.headers:
                start, stop = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                whole, data, status = len(data), data[start : stop + 1], 206
                extra = {"Content-Range": f"bytes {start}-{start + len(data) - 1}/{whole}"}
            self.send_response(status)
            for name, value in ({"ETag": tag, "Content-Length": str(len(data))} | extra).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_GET = do_HEAD = _serve

    with serving(Handler, _Files) as server:
        yield server, server.url  # type: ignore[misc]


def test_a_file_of_a_web_server_is_an_input_and_its_version_is_kept(
    web: tuple[_Files, str], tiny_tokenizer: Path, tmp_path: Path
) -> None:
    server, url = web
    source = write_jsonl(tmp_path / "a.jsonl", texts(40))
    server.data = source.read_bytes()
    made = make_dataset([f"{url}/a.jsonl"], tiny_tokenizer, tmp_path / "far")
    near = make_dataset([source], tiny_tokenizer, tmp_path / "near")
    assert made.manifest.totals == near.manifest.totals
    with pytest.raises(UsageError, match="no folder of a web server can be listed"):
        make_dataset([f"{url}/gone.jsonl"], tiny_tokenizer, tmp_path / "gone")
    store = Store(url)
    assert store.read("a.jsonl", 3, 9) == server.data[3:9]
    tag = hashlib.md5(server.data).hexdigest()
    server.data += b"\n"
    with pytest.raises(StorageError):
        store.bucket.get("a.jsonl", etag=tag)
    server.ranges = False
    with pytest.raises(StorageError, match="does not honour ranges"):
        store.read("a.jsonl", 3, 9)


def test_a_dataset_on_the_hub_is_opened_as_one_on_disk(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(40))
    folder = tmp_path / "hub" / "datasets" / "org" / "tokens" / "web"
    make_dataset([source], tiny_tokenizer, folder)
    with HubStub(tmp_path / "hub").running() as hub:
        for name, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        dataset = Dataset.open("hf://datasets/org/tokens/web")
        assert dataset.documents == 40
        assert (dataset.document(7).tokens == Dataset.open(str(folder)).document(7).tokens).all()
        with pytest.raises(InputError):
            Dataset.open("hf://datasets/org/tokens/gone")


def test_a_model_of_transformers_is_read_where_it_lies(
    clouds: tuple[str, str], tmp_path: Path
) -> None:
    hf_model("llama").save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    near = load_model(tmp_path / "llama")
    assert isinstance(near, Decoder)
    for cloud in clouds:
        for path in (tmp_path / "llama").iterdir():
            Store(f"{cloud}/llama").put(path.name, path.read_bytes())
        far = load_model(f"{cloud}/llama")
        assert isinstance(far, Decoder)
        assert same_bits(far.state_dict(), near.state_dict())
