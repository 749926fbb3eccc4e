"""Every error of a store becomes words: what, where, why, and what to do."""

from __future__ import annotations

import pytest

from olm_data.errors import InputError
from olm_data.storage.bucket import service
from olm_data.storage.failures import is_transient, said, translated
from olm_data.storage.objects import RemoteFailure
from olm_data.storage.service import CredentialEcho, OversizedAnswer, Refusal

URL = "memory://b/k"


def words(error: Exception, operation: str = "put_object", attempts: int = 1) -> str:
    found = translated(service("memory"), error, URL, operation, attempts)
    assert isinstance(found, RemoteFailure)
    assert found.exit_code == 6
    assert f"{URL} ({operation}" in str(found.where)
    return str(found)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (Refusal(503, "SlowDown"), True),
        (Refusal(429), True),
        (Refusal(400, "BadDigest"), True),
        (Refusal(501, "NotImplemented"), False),
        (Refusal(403, "AccessDenied"), False),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (ConnectionError("[SSL: CERTIFICATE_VERIFY_FAILED]"), False),
        (KeyError("size"), False),
        (OversizedAnswer("more"), False),
        (InputError("ours"), False),
    ],
)
def test_what_may_pass_is_tried_again_and_nothing_else(error: Exception, again: bool) -> None:
    assert is_transient(error) is again


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (Refusal(503, "SlowDown", "wait", "id-1"), "refused 3 times: 503 SlowDown"),
        (Refusal(403, "AccessDenied"), "what they are allowed to do"),
        (Refusal(400, "ExpiredToken"), "what they are allowed to do"),
        (Refusal(404, "NoSuchBucket"), "the bucket does not exist: 404 NoSuchBucket"),
        (Refusal(307), "redirects to another address: 307"),
        (Refusal(403, "RequestTimeTooSkewed"), "set this machine's clock"),
        (FileNotFoundError("container"), "the bucket does not exist: 404"),
        (CredentialEcho(), "repeats a credential"),
        (OversizedAnswer("more than 10 bytes"), "sends more than 10 bytes"),
        (ConnectionResetError(), "fails 3 times: the connection failed (ConnectionResetError)"),
        (TimeoutError(), "no answer in time (TimeoutError)"),
        (KeyError("size"), "cannot be read"),
    ],
)
def test_a_failure_says_what_went_wrong_and_what_helps(error: Exception, what: str) -> None:
    assert what in words(error, attempts=3)


def test_the_id_of_a_request_is_told_and_its_words_are_bounded() -> None:
    text = words(Refusal(503, "SlowDown", "x" * 500, "id-1"))
    assert "(put_object, request id id-1)" in text
    assert "x" * 80 in text
    assert "x" * 81 not in text
    assert said(Refusal(503, "SlowDown")) == "the store answered 503 SlowDown"


def test_what_is_not_the_stores_doing_stays_as_it_is() -> None:
    here = service("memory")
    for error in (InputError("ours"), OSError(5, "Input/output error"), AssertionError()):
        assert translated(here, error, URL, "put_object", 1) is None
    found = translated(here, FileNotFoundError("k"), URL, "get_object", 1)
    assert isinstance(found, FileNotFoundError)
