"""The server, as OpenAI's own client sees it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.polling import wait_until
from support.talking import POSITIONS, save_talker

from olm_data.errors import ResourceError
from olm_train.extensions.generate.engine import Engine, Generation, TextRequest
from olm_train.extensions.generate.loaded import LoadedModel
from olm_train.extensions.generate.runner import Read, TextRunner
from olm_train.extensions.generate.sampling import Sampling
from olm_train.extensions.generate.template import ChatTemplate
from olm_train.extensions.serve.command import ModelServer
from olm_train.extensions.serve.worker import TextJob, Worker

if TYPE_CHECKING:
    import openai  # a second, in each process that collects

pytestmark = pytest.mark.xdist_group("serve")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_talker(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="module")
def loaded(saved: Path) -> LoadedModel:
    return LoadedModel.open(str(saved), "latest", print, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def server(loaded: LoadedModel) -> Iterator[ModelServer]:
    with (
        Worker(loaded.engine(8)) as worker,
        ModelServer(loaded, ChatTemplate(), worker, "tiny", 0) as server,
    ):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def client(server: ModelServer) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=600) as client:
        yield client


def alone(loaded: LoadedModel, prompt: str, **options: Any) -> Generation:
    wish = {name: options.pop(name) for name in ("temperature", "top_p", "seed") if name in options}
    asked = TextRequest(prompt=loaded.ids_of(prompt), sampling=Sampling(**wish), **options)
    return loaded.engine().run([asked])[0]


def test_a_completion_is_what_the_engine_writes(client: openai.OpenAI, loaded: LoadedModel) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    answer = client.completions.create(
        model="tiny", prompt=["the cat", "tokens"], max_tokens=9, seed=5, temperature=1.5,
        top_p=0.9, n=2,
    )  # fmt: skip
    expected = [
        alone(loaded, prompt, max_new_tokens=9, seed=seed, temperature=1.5, top_p=0.9)
        for prompt in ("the cat", "tokens")
        for seed in (5, 6)
    ]
    assert [choice.text for choice in answer.choices] == [each.text for each in expected]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.finish_reason for choice in answer.choices] == [e.finish for e in expected]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(each.ids) for each in expected)
    assert answer.usage.prompt_tokens == sum(
        len(loaded.ids_of(text)) for text in ("the cat", "tokens")
    )


def test_options_of_others_come_as_extra_body(client: openai.OpenAI, loaded: LoadedModel) -> None:
    extra = {"top_k": 1}
    answer = client.completions.create(model="", prompt="the", max_tokens=8, extra_body=extra)
    assert answer.choices[0].text == alone(loaded, "the", max_new_tokens=8, temperature=0).text
    stopped = answer.choices[0].text[3:5]
    again = client.completions.create(
        model="", prompt="the", max_tokens=8, stop=stopped, extra_body=extra
    )
    assert again.choices[0].text == answer.choices[0].text[: answer.choices[0].text.index(stopped)]
    assert again.choices[0].finish_reason == "stop"


def test_without_a_seed_texts_differ(client: openai.OpenAI) -> None:
    texts = {
        client.completions.create(model="", prompt="a", max_tokens=12).choices[0].text
        for _ in range(3)
    }
    assert len(texts) > 1


def test_echo_scores_the_prompt(client: openai.OpenAI, loaded: LoadedModel) -> None:
    prompt = "the cat; été 🙂"
    ids = loaded.ids_of(prompt)
    answers = [
        client.completions.create(
            model="", prompt=given, max_tokens=most, echo=True, logprobs=2, temperature=0
        ).choices[0]
        for given in (prompt, list(ids))
        for most in (0, 3)
    ]
    with torch.no_grad():
        known = loaded.model(torch.tensor([ids]))[0].log_softmax(-1)
    for answer in answers:
        assert answer.text.startswith(prompt)
        found = answer.logprobs
        assert found is not None
        assert found.token_logprobs is not None
        assert found.text_offset is not None
        assert found.tokens is not None
        assert found.top_logprobs is not None
        assert found.token_logprobs[0] is None
        expected = [known[n, token].item() for n, token in enumerate(ids[1:])]
        assert found.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-5)
        assert all(len(top) == 2 for top in found.top_logprobs[1:])
        for offset, token, number in zip(found.text_offset, found.tokens, ids, strict=False):
            if "\ufffd" not in loaded.text_of([number]):
                assert answer.text[offset : offset + len(token)] == token
    assert answers[0].text == prompt
    assert answers[1] == answers[3]
    assert answers[1].logprobs is not None
    assert len(answers[1].logprobs.tokens or []) == len(ids) + 3


def test_an_empty_prompt_begins_a_document_that_is_not_told(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="", prompt="", max_tokens=2, echo=True, logprobs=0, temperature=0
    ).choices[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs.tokens or []) == 2
    assert "endoftext" not in answer.text
    assert answer.logprobs.text_offset is not None
    assert answer.logprobs.text_offset[0] == 0


def test_a_stream_is_the_whole_in_pieces(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "", "prompt": "the cat", "max_tokens": 20, "seed": 3, "logprobs": 1, "n": 2,
    }  # fmt: skip
    whole = client.completions.create(**options)
    events = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert events[-1].usage == whole.usage
    assert events[-1].choices == []
    assert len(events) > 6
    for choice in whole.choices:
        own = [c for event in events for c in event.choices if c.index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        assert own[-1].finish_reason == choice.finish_reason
        for name in ("tokens", "token_logprobs", "text_offset"):
            parts = [getattr(piece.logprobs, name) for piece in own]
            joined = [value for part in parts for value in part]
            assert joined == getattr(choice.logprobs, name)


def test_a_conversation_is_answered(client: openai.OpenAI, loaded: LoadedModel) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "the cat"}]},
    ]
    options: dict[str, Any] = {
        "model": "", "messages": messages, "seed": 1, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    answer = client.chat.completions.create(**options)  # to the end of what it looks at
    prompt = "x\n\nUser: the cat\nAssistant:"
    room = POSITIONS - len(loaded.ids_of(prompt))
    text = alone(loaded, prompt, seed=1, stop=("\nUser:",), max_new_tokens=room)
    choice = answer.choices[0]
    assert choice.message.content == text.text
    assert choice.finish_reason == text.finish
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    whole = b"".join(bytes(token.bytes or []) for token in content)
    assert whole.decode(errors="replace") == text.text
    assert {len(token.top_logprobs) for token in content} == {2}
    events = list(client.chat.completions.create(**options, stream=True))
    assert events[0].choices[0].delta.role == "assistant"
    pieces = [event.choices[0].delta.content or "" for event in events]
    assert "".join(pieces) == text.text
    assert events[-1].choices[0].finish_reason == text.finish
    short = client.chat.completions.create(**options, max_completion_tokens=2)
    assert short.usage is not None
    assert short.usage.completion_tokens == 2


def test_many_clients_get_what_each_gets_alone(client: openai.OpenAI, loaded: LoadedModel) -> None:
    def ask(seed: int) -> str:
        return (
            client.completions.create(model="", prompt="the " * seed, max_tokens=15, seed=seed)
            .choices[0]
            .text
        )

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(1, 13)))
    for seed, text in enumerate(texts, 1):
        assert text == alone(loaded, "the " * seed, max_new_tokens=15, seed=seed).text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt": "a" * 3000}, "looks at 96"),
        ({"prompt": [1, 300]}, "knows only 300"),
        ({"prompt": ["a", 1]}, "a text or a list of ids"),
        ({"prompt": []}, "a text or a list of ids"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "extra_body": {"repetition_penalty": 1e-300}}, "repetition_penalty"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "presence_penalty": 1}, "presence_penalty"),
        ({"prompt": "a", "logit_bias": {"5": 10}}, "logit_bias"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "n": 1000}, "256"),
        ({"prompt": ["a"] * 200, "n": 2}, "256 texts"),
        ({"prompt": "a", "extra_body": {"guided_json": {}}}, "guided_json"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_answered_is_refused(
    client: openai.OpenAI, options: dict[str, Any], says: str, stream: bool
) -> None:
    from openai import APIStatusError

    with pytest.raises(APIStatusError) as refused:
        client.completions.create(model="", stream=stream, **options)
    assert refused.value.status_code == 400
    assert says in str(refused.value)
    assert client.completions.create(model="", prompt="a", max_tokens=1).choices


def raw(server: ModelServer, method: str, path: str, body: bytes, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=600)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def test_pages_of_other_sites_are_not_answered(server: ModelServer) -> None:
    good, kind = json.dumps({"max_tokens": 1}).encode(), {"Content-Type": "application/json"}
    path = "/v1/completions"
    assert raw(server, "POST", path, good, kind) == 200
    assert raw(server, "POST", path, good, {"Content-Type": "text/plain"}) == 415
    assert raw(server, "POST", path, good, {**kind, "Host": "evil.example"}) == 421
    assert raw(server, "GET", "/v1/models", b"", {"Host": "evil.example"}) == 421
    assert raw(server, "GET", "/v1/other", b"", {}) == 404
    assert raw(server, "POST", "/v1/other", good, kind) == 404
    assert raw(server, "POST", path, b"{", kind) == 400
    assert raw(server, "POST", path, b"", {**kind, "Content-Length": "99999999999"}) == 413
    assert raw(server, "POST", path, b"", {**kind, "Content-Length": "many"}) == 411


def test_a_port_that_is_taken_is_named(server: ModelServer, loaded: LoadedModel) -> None:
    with (
        Worker(loaded.engine()) as worker,
        pytest.raises(ResourceError, match="cannot be listened on"),
    ):
        ModelServer(loaded, ChatTemplate(), worker, "x", server.server_port)


def begun(server: ModelServer, body: dict[str, Any]) -> socket.socket:
    """A connection on which a completion was asked for, and nothing was read."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=600)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_texts_of_a_client_that_left_are_given_up(
    server: ModelServer, client: openai.OpenAI, stream: bool
) -> None:
    worker, submit = server.worker, server.worker.submit

    def kept(requests: Any) -> TextJob:
        job = submit(requests)
        jobs.append(job)
        return job

    jobs = list[TextJob]()
    worker.submit = kept  # type: ignore[method-assign]
    try:
        body = {"prompt": "a", "max_tokens": 90, "n": 200, "stream": stream}
        with begun(server, body) as connection:
            wait_until(lambda: jobs, "the request")
            if stream:
                connection.recv(100)
            linger = struct.pack("ii", 1, 0)  # a reset, as of a process that was killed
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        wait_until(lambda: jobs[0].dropped, "the server sees it")
    finally:
        worker.submit = submit  # type: ignore[method-assign]
    assert client.completions.create(model="", prompt="a", max_tokens=2).choices


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "\\ud800"}', b'{"temperature": NaN}', b'{"seed": 123456789012345678901234}',
        b'{"prompt": [-1]}', b'{"prompt": [99999999999]}', b'{"prompt": [true]}',
    ],
)  # fmt: skip
def test_a_malformed_body_is_the_clients_fault(server: ModelServer, body: bytes) -> None:
    kind = {"Content-Type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert raw(server, "POST", path, body, kind) == 400


def test_slow_clients_hold_nobody_up(server: ModelServer, client: openai.OpenAI) -> None:
    host = f"Host: 127.0.0.1:{server.server_port}\r\n"
    parts = [b"POST /v1/compl", f"POST /v1/completions HTTP/1.1\r\n{host}Content-Le".encode()]
    with contextlib.ExitStack() as stack:
        for part in parts * 20:
            connection = socket.create_connection(("127.0.0.1", server.server_port))
            stack.enter_context(connection).sendall(part)
        assert client.completions.create(model="", prompt="a", max_tokens=2).choices


class Endless(TextRunner):
    """The same token again and again, by a slow model."""

    def prefill(
        self, prompts: Sequence[Sequence[int]], reads: Sequence[Read | None] = ()
    ) -> tuple[torch.Tensor, list[Any]]:
        return self.decode([0] * len(prompts)), [None] * len(prompts)

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        time.sleep(0.01)
        return torch.tensor([[0.0, 99.0]]).repeat(len(tokens), 1)

    def remove(self, row: int) -> None:
        pass

    def __init__(self) -> None:
        pass


def test_those_who_wait_are_told_of_the_end(loaded: LoadedModel) -> None:
    worker = Worker(Engine(Endless(), loaded.tokenizer))
    said = {False: b"", True: b""}

    def ask(stream: bool) -> None:
        body = {"prompt": "a", "max_tokens": 1 << 30, "stream": stream}
        with begun(server, body) as connection:
            connection.settimeout(60)
            while b"the server is stopping" not in said[stream]:
                said[stream] = said[stream][-100:] + connection.recv(1 << 16)

    with ModelServer(loaded, ChatTemplate(), worker, "tiny", 0) as server, worker:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        assert raw(server, "GET", "/health", b"", {}) == 200
        clients = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for each in clients:
            each.start()
        wait_until(lambda: worker._count == 2 and said[True], "both are written")
        worker.__exit__(None, None, None)
        for each in clients:
            each.join()
        assert raw(server, "GET", "/health", b"", {}) == 503
        server.shutdown()
        serving.join()
    assert all(b"the server is stopping" in each for each in said.values())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_interrupted(saved: Path, number: int) -> None:
    command = [sys.executable, "-m", "olm_train.cli", "serve", str(saved), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        try:
            assert it.stdout is not None
            line = it.stdout.readline()
            found = re.search(r"http://\S+/v1", line)
            assert found, line
            assert "not for production" in line
            import openai

            with openai.OpenAI(base_url=found[0], api_key="none", timeout=600) as client:
                client.completions.create(model="", prompt="a", max_tokens=5)
                events = client.completions.create(
                    model="", prompt="a", max_tokens=90, n=200, stream=True
                )
                next(iter(events))
                it.send_signal(number)
                with pytest.raises(openai.APIError, match="the server is stopping"):
                    list(events)
                assert it.wait(600) == 0
        finally:
            it.kill()
