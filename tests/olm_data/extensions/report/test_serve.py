"""The page of runs: served on loopback to who asks by its own name, and drawn in a browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.browser import Browser, browser, needs_browser

from olm_data.errors import ResourceError
from olm_data.extensions.ledger.files import Entries, LedgerInfo, LedgerWriter
from olm_data.extensions.report.run_view import RunView
from olm_data.extensions.report.serve import PageServer
from olm_data.extensions.report.write import write_report
from olm_data.mixture.lock import Lock
from olm_data.rows.views import LockRows
from olm_data.run_log.log import End, append_end
from olm_data.run_log.run_folder import BadDocument, BadRow, BadStep

HOSTILE = "<img src=x onerror=document.title='hacked'><script>document.title='hacked'</script>"


@pytest.fixture
def server(lock: Path, run: Path) -> Iterator[PageServer]:
    with served([RunView(run, HOSTILE, str(lock))]) as serving:
        yield serving


@contextlib.contextmanager
def served(views: list[RunView]) -> Iterator[PageServer]:
    """Answer for some runs while the body runs."""
    with PageServer(views, 0) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield serving
        finally:
            serving.shutdown()
            thread.join()


def get(server: PageServer, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=600)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return found


def test_it_listens_on_loopback_only(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(ResourceError, match="cannot be listened on"):
        PageServer([], server.server_port)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", ""])
def test_a_request_under_another_name_is_refused(host: str, server: PageServer) -> None:
    for path in ("/", "/data?run=0", "/step?run=0&step=1"):
        code, body, _ = get(server, path, Host=host)
        assert code == 421
        assert b"train" not in body


@pytest.mark.parametrize(
    "path",
    [
        "/../metrics.jsonl", "/metrics.jsonl", "/data?run=1", "/data?run=-1", "/data?run=../run",
        "/step?run=0&step=x", "/step?run=99999999999999999999&step=1", "//etc/passwd", "/%2e%2e/",
    ],
)  # fmt: skip
def test_no_path_is_served(path: str, server: PageServer) -> None:
    assert get(server, path)[0] == 404


def test_every_answer_says_that_nothing_else_may_be_run_or_fetched(server: PageServer) -> None:
    for path in ("/", "/data?run=0", "/nothing"):
        headers = get(server, path)[2]
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'sha256-" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_what_fails_is_an_answer(server: PageServer, run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write("{\n")
    code, body, _ = get(server, "/data?run=0")
    assert (code, json.loads(body)["points"]["steps"]) == (200, [1, 2, 3, 4, 5])
    assert any("1 line of metrics.jsonl left out" in n for n in json.loads(body)["words"]["notes"])
    (run / "starts.jsonl").write_text("{\n")
    code, body, _ = get(server, "/data?run=0")
    assert (code, json.loads(body)) == (409, {"error": "a file of the run is malformed"})


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def chromium(started: Browser) -> Iterator[Browser]:
    """One for all: to start it costs more than most that is asked of it."""
    yield started
    started.close_pages()


@needs_browser
def test_a_browser_draws_the_run_as_it_grows_and_a_click_shows_documents(
    chromium: Browser, server: PageServer, run: Path, grow: Callable[[int, int], None]
) -> None:
    piece = BadDocument(None, HOSTILE, 1, "line", "s", 0, 0, 9)
    bad = BadStep(step=3, loss="9.5", grad_norm="7.0", rows=[BadRow(1, "main", "a", [piece])])
    bad.write(run / "spike-step00000003.json")
    page = chromium.open(server.url)
    page.wait("document.querySelector('path.train') && document.querySelector('.mark-spike')")
    assert page.js("document.querySelector('#olm-run').dataset.drawn") == "5"
    before = page.js("document.querySelector('path.train').getAttribute('d')")
    assert before.count("L") == 4
    for text in ("loss on a", "5.250", "Mixture drawn so far", "def <f>", HOSTILE):
        assert text in page.text()
    grow(6, 21)
    page.wait("document.querySelector('#olm-run').dataset.drawn == '20'")
    assert page.js("document.querySelector('path.train').getAttribute('d')").count("L") == 19
    page.click("#olm-run svg", across=0.62, down=0.5)
    page.wait("document.querySelector('#olm-documents pre')")
    shown = page.js("document.querySelector('#olm-documents h2').textContent")
    step = int(shown.rpartition(" ")[2])
    assert 9 <= step <= 15
    rows = json.loads(get(server, f"/step?run=0&step={step}")[1])["rows"]
    for row in rows:
        assert f"row {row['row']}" in page.text()
        assert row["pieces"][0]["name"] in page.text()
    page.js("document.querySelector('input[type=number]').value = 2")
    page.click("#olm-show")
    page.wait("document.querySelector('#olm-documents h2').textContent.endsWith(' 2')")
    append_end(run, End(step=20, time=2e9, reason="cancelled", by="me", why=HOSTILE))
    page.wait("document.querySelector('.badge').textContent == 'cancelled'")
    assert HOSTILE in page.text()
    assert page.js("document.querySelectorAll('img').length") == 0
    assert page.js("document.title").startswith("olm run: <img")
    assert chromium.problems == []


def ledger_of(lock: Path, run: Path, step: int) -> list[dict[str, Any]]:
    """Write what the pieces of a step cost, one nat more each; return what a page is told."""
    rows, pieces = LockRows(Lock.read(lock)), list[tuple[int, str, int, int, int]]()
    for row in range(4 * step - 4, 4 * step):
        view = rows.view(row)
        pieces += [(row, str(view.source), p.document, p.start, p.stop) for p in view.pieces]
    row, source, document, start, stop = map(list, zip(*pieces, strict=True))
    cost, size = np.arange(1.0, len(pieces) + 1), np.subtract(stop, start)
    info = LedgerInfo(rank=0, world_size=1, lock="d")
    writer = LedgerWriter(run, info, steps_per_file=1, max_rows=1000)
    writer.add(
        Entries(
            step=step,
            row=np.array(row),
            source=source,
            shard=["s"] * len(row),
            document=np.array(document),
            start=np.array(start),
            stop=np.array(stop),
            epoch=np.zeros(len(row), int),
            tokens=size,
            nats=cost * size,
        )
    )
    return [{"row": r, "loss": float(c)} for r, c in zip(row, cost, strict=True)]


@needs_browser
def test_a_click_shows_what_each_document_cost_and_the_page_what_each_source_does(
    chromium: Browser, server: PageServer, lock: Path, run: Path
) -> None:
    want = ledger_of(lock, run, 3)
    assert get(server, "/data?run=0")[0] == 200  # reads the log
    told = json.loads(get(server, "/step?run=0&step=3")[1])
    costs = [(row["row"], piece["loss"]) for row in told["rows"] for piece in row["pieces"]]
    assert costs == [(each["row"], pytest.approx(each["loss"])) for each in want]
    assert told["losses"]["top"][0]["loss"] == want[-1]["loss"]
    assert json.loads(get(server, "/step?run=0&step=2")[1])["losses"] is None
    page = chromium.open(server.url)
    page.wait("document.querySelectorAll('path.part').length >= 2")
    page.js("document.querySelector('input[type=number]').value = 3")
    page.click("#olm-show")
    page.wait("document.querySelector('#olm-losses')")
    assert "what raised it" in page.text()
    assert f"loss {len(want)}" in page.text()
    page.js("document.querySelector('input[type=number]').value = 2")
    page.click("#olm-show")
    page.wait("document.querySelector('#olm-documents h2').textContent.endsWith(' 2')")
    page.wait("document.querySelector('#olm-documents .docs')")
    assert "no losses of this step yet" in page.text()
    assert "null" not in page.text()
    assert chromium.problems == []


@needs_browser
def test_the_legends_of_two_runs_tell_their_curves_apart(
    chromium: Browser, lock: Path, run: Path, tmp_path: Path
) -> None:
    sets = ["a", "b", "merged/a", "merged/b"]
    results = {name: {"CE loss": 5.0 + n, "BPB": 1.0 + n} for n, name in enumerate(sets)}
    with (run / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": 5, "eval": results}) + "\n")
    for step in (1, 2):
        ledger_of(lock, run, step)
    folders = [run, *(shutil.copytree(run, tmp_path / name) for name in ("second", "third"))]
    views = [RunView(each, each.name, str(lock)) for each in folders]
    with served(views) as serving:
        page = chromium.open(serving.url)
        page.wait("document.querySelectorAll('#clip-0 ~ g path.train').length == 3")
        page.wait("document.querySelectorAll('.part .swatch').length >= 6 + 3 * 4")
        seen = "[...document.querySelectorAll('%s .swatch')].map(n => n.style.background)"
        legend, parts = page.js(seen % ".legend"), page.js(seen % ".part")
        assert len(set(legend)) == len(legend) == 3 + len(sets)
        held = parts[: 3 * len(sets)]
        assert len(set(held)) == len(held)
        text = "[...document.querySelectorAll('.part')].map(n => n.textContent).join()"
        latest = page.js(text)
        first, past = (
            page.js(
                "(() => { const n = document.querySelector('input[type=number]'); "
                f"n.value = {step}; n.dispatchEvent(new Event('change')); return {text} }})()"
            )
            for step in (1, 5)
        )
        assert first != latest
        assert past == latest  # the ledger ends at step 2
        assert chromium.problems == []


@needs_browser
def test_runs_are_compared_over_tokens_and_by_the_options_that_differ(
    chromium: Browser, lock: Path, run: Path, tmp_path: Path, grow: Callable[[int, int], None]
) -> None:
    grow(6, 41)
    other = Path(shutil.copytree(run, tmp_path / "other"))
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    twice = [{**line, "tokens": 2 * line.get("tokens", 0)} for line in lines]
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in twice))
    for folder, lr in ((run, 0.1), (other, 0.2)):
        config = {"optim": {"name": HOSTILE, "lr": lr}, "seed": 1}
        (folder / "config.json").write_text(json.dumps(config))
    output = write_report(str(lock), [str(run), str(other)], str(tmp_path / "r.html"), say=print)
    ends = (
        "[...document.querySelectorAll('#clip-0 ~ g path.train')]"
        ".map(n => n.getAttribute('d').split('L').pop().split(' ')[0] * 1)"
    )
    choose = (
        "(() => {{ const n = document.querySelector('#{}'); n.value = '{}'; "
        "n.dispatchEvent(new Event('{}')) }})()"
    )
    page = chromium.open(output.as_uri())
    page.wait("document.querySelectorAll('#clip-0 ~ g path.train').length == 2")
    first, second = page.js(ends)
    assert first == second
    page.js(choose.format("olm-axis", "tokens", "change"))
    first, second = page.js(ends)
    assert first - 52 == pytest.approx((second - 52) / 2, abs=1)  # 52: left of the axis
    page.js(choose.format("olm-smooth", "0.9", "input"))
    assert page.js("document.querySelectorAll('#clip-0 ~ g path.smooth').length") == 2
    cells = "[...document.querySelectorAll('#olm-apart td')].map(n => n.textContent)"
    assert page.js(cells) == ["optim.lr", "0.1", "0.2"]
    narrow = chromium.open(output.as_uri(), width=390)  # each cell names its run
    narrow.wait("document.querySelectorAll('#olm-apart td').length == 3")
    named = (
        "[...document.querySelectorAll('#olm-apart td')]"
        ".map(n => getComputedStyle(n, '::before').content)"
    )
    assert narrow.js(named) == ["none", f'"{run.name}"', '"other"']
    assert chromium.problems == []


@needs_browser
@pytest.mark.parametrize("width", [400, pytest.param(1280, marks=pytest.mark.slow)])
def test_the_report_is_the_same_page_frozen(
    chromium: Browser,
    lock: Path,
    run: Path,
    tmp_path: Path,
    width: int,
    grow: Callable[[int, int], None],
) -> None:
    with (run / "metrics.jsonl").open("a") as log:  # one wide chart, of a place for two
        log.write(json.dumps({"step": 5, "eval": {"a": {"CE loss": 5.0, "BPB": 1.0}}}) + "\n")
    grow(6, 300)
    output = write_report(str(lock), [str(run)], str(tmp_path / "r.html"), say=print)
    page = chromium.open(output.as_uri(), width=width)
    page.wait("document.querySelector('path.train')")
    page.wait("document.documentElement.scrollWidth <= innerWidth")
    drawn = page.js(
        "[...document.querySelectorAll('.chart:not([hidden]) > svg')]"
        ".map(n => [n.clientHeight, +n.getAttribute('height')])"
    )
    assert len(drawn) >= 2
    assert all(painted == pytest.approx(height, abs=1) for painted, height in drawn)
    cut = (
        "[...document.querySelectorAll('.figure svg')]"
        ".filter(n => n.getBoundingClientRect().right > innerWidth).length"
    )
    assert page.js(cut) == 0
    page.js("document.querySelector('input[type=number]').value = 5")
    page.click("#olm-show")
    page.wait("document.querySelector('#olm-documents .docs pre')")
    page.js("document.querySelector('input[type=number]').value = 10")
    page.click("#olm-show")
    typed = page.js("document.querySelector('#olm-documents pre').textContent")
    assert typed == f"olm-data show step {lock} 10 --run {run}"
    page.click("#olm-documents button")
    page.wait("document.querySelector('#olm-documents .docs pre')")
    assert chromium.problems == []
