"""What the hub's client raises becomes an error that says what to type, by its kind."""

from __future__ import annotations

import pytest
from huggingface_hub import errors as hub

from olm_data.errors import ConflictError, InputError, OlmError, StorageError, UsageError
from olm_data.storage.hub_answers import explained


class _Response:
    request = None

    def __init__(self, status: int) -> None:
        self.status_code, self.headers = status, dict[str, str]()


def answer(kind: type[hub.HfHubHTTPError], status: int) -> Exception:
    return kind("said", response=_Response(status), server_message="hf_" + "x" * 30)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (answer(hub.GatedRepoError, 403), UsageError, "terms"),
        (answer(hub.RevisionNotFoundError, 404), InputError, "no such revision"),
        (answer(hub.RepositoryNotFoundError, 404), InputError, "no such dataset"),
        (answer(hub.HfHubHTTPError, 403), StorageError, "refuses this user"),
        (answer(hub.HfHubHTTPError, 412), ConflictError, "in the meantime"),
        (answer(hub.HfHubHTTPError, 500), StorageError, "the hub answered 500"),
        (hub.OfflineModeIsEnabled("offline"), StorageError, "offline"),
        (hub.HFValidationError("a--b"), UsageError, "name of a repository"),
        (ConnectionError("refused"), StorageError, "cannot be reached"),
        (RuntimeError("Error while uploading"), StorageError, "client stopped"),
    ],
)
def test_errors(error: Exception, kind: type[OlmError], said: str) -> None:
    found = explained(error, "hf://datasets/lab/books", "dataset")
    assert type(found) is kind
    assert said in str(found)
    assert "hf_x" not in str(found)


def test_what_an_upload_failed_of_is_told_and_a_defect_is_none() -> None:
    error = RuntimeError("Error while uploading 'x' to the Hub.")
    error.__cause__ = answer(hub.HfHubHTTPError, 403)
    assert "refuses this user" in str(explained(error, "hf://lab/model", "model"))
    assert explained(KeyError("x"), "hf://lab/model", "model") is None
