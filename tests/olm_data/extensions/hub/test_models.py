"""Exported models to the hub and back: every byte by the receipt, whole or not seen as whole."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from support.command import Olm, arguments, environment, olm_data
from support.forged import flip
from support.hub_commits import Answer
from support.hub_stub import HubStub
from support.polling import wait_until
from support.pushed_models import exported_model, receipt
from support.tokenizing import digests

from olm_data.errors import ConflictError, InputError, StorageError, UsageError, ValidationError
from olm_data.extensions.hub.pull import pull
from olm_data.extensions.hub.push import push

FIRST = "hf://lab/first"
FILES = {"README.md", "config.json", "model.safetensors", "olm-export.json"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return exported_model(tmp_path / "model")


def at_hub(hub: HubStub) -> Path:
    return hub.root / "models/lab/first"


def put(hub: HubStub, **files: bytes) -> None:
    """Let somebody else put files into the repository."""
    at_hub(hub).mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        path = at_hub(hub) / name.replace("__", ".")
        path.unlink(missing_ok=True)
        path.write_bytes(data)


def test_a_model_comes_back_byte_for_byte(hub: HubStub, model: Path, tmp_path: Path) -> None:
    done = push(str(model), FIRST)
    assert (done.status, done.kind, done.sent, done.kept) == ("pushed", "model", 4, 0)
    assert done.digest == hashlib.sha256((model / "olm-export.json").read_bytes()).hexdigest()
    back = pull(f"{FIRST}@{done.commit}", str(tmp_path / "back"))
    assert (back.status, back.kind, back.files) == ("pulled", "model", 4)
    assert (back.commit, back.digest) == (done.commit, done.digest)
    assert digests(tmp_path / "back") == digests(model)
    assert pull(FIRST, str(tmp_path / "back")).status == "already there"


def test_a_model_in_our_own_format_comes_back(hub: HubStub, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from olm_train.model.config import DecoderConfig
    from olm_train.model.decoder import Decoder
    from olm_train.model.init import init_parameters
    from olm_train.model.weights_folder import load_exported

    for seed, name in enumerate(("own", "other")):
        decoder = Decoder(DecoderConfig(d_model=8, n_layers=1, n_heads=2, vocab_size=10))
        init_parameters(decoder, seed)
        decoder.save(tmp_path / name)
    done = push(str(tmp_path / "own"), FIRST)
    assert (done.sent, done.not_sent) == (2, [])
    assert push(str(tmp_path / "own"), FIRST).status == "already there"
    pull(FIRST, str(tmp_path / "back"))
    assert digests(tmp_path / "back") == digests(tmp_path / "own")
    assert load_exported(str(tmp_path / "back")).weights
    with pytest.raises(ConflictError, match="another model"):
        push(str(tmp_path / "other"), FIRST)
    with pytest.raises(ConflictError, match="another model"):
        push(str(exported_model(tmp_path / "hf")), FIRST)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_model_is_not_sent(hub: HubStub, model: Path, name: str) -> None:
    flip(model / name)
    with pytest.raises(ValidationError, match=f"not those that were exported: {name}"):
        push(str(model), FIRST)
    (model / name).unlink()
    with pytest.raises(ValidationError, match=f"not those that were exported: {name}"):
        push(str(model), FIRST)
    assert not at_hub(hub).exists()


def test_a_model_damaged_on_the_hub_is_not_put_in_place(
    hub: HubStub, model: Path, tmp_path: Path
) -> None:
    push(str(model), FIRST)
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-1] ^= 1
    hub.commit("models/lab/first", path="config.json", content="e30=")  # by whoever may write there
    with pytest.raises(ValidationError, match=r"not those that were exported: config\.json"):
        pull(FIRST, str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()
    assert push(str(model), FIRST).sent == 2  # the same model: put right
    for path in hub.root.rglob("model.safetensors"):  # and by who could write to the hub's disk
        path.unlink()
        path.write_bytes(data)
    with pytest.raises(ValidationError, match=r"not those that were exported: model\.safetensors"):
        pull(FIRST, str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


def test_a_hub_that_names_files_otherwise_the_second_time_is_refused(
    hub: HubStub, model: Path, tmp_path: Path
) -> None:
    push(str(model), FIRST)
    other = tmp_path / "other.json"
    other.write_bytes((model / "olm-export.json").read_bytes() + b"\n")
    real, seen = hub.answer, list[str]()

    def answer(method: str, path: str, body: bytes, authorization: str = "") -> object:
        if "/resolve/" in path and path.endswith("olm-export.json"):
            seen.append(method)
            if "GET" in seen[:-1]:
                return other
        return real(method, path, body, authorization)

    hub.answer = answer  # type: ignore[method-assign]
    with pytest.raises(ValidationError, match="other bytes each time"):
        pull(FIRST, str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("config.json", "of another program"),
        ("olm-export.json", "not the receipt"),
        ("model.safetensors", "would be replaced"),
        ("model-00001-of-00002.safetensors", "readers would take"),
        ("model.safetensors.index.json", "readers would take"),
        ("adapter_config.json", "readers would take"),
    ],
)
def test_what_readers_would_mix_with_it_is_refused(
    hub: HubStub, model: Path, name: str, said: str
) -> None:
    put(hub, **{name: b"{}"})
    with pytest.raises(ConflictError) as refused:
        push(str(model), FIRST)
    assert said in str(refused.value)
    assert digests(at_hub(hub)).keys() == {name}


def test_other_files_stay_on_both_sides_and_are_named(
    hub: HubStub, model: Path, tmp_path: Path
) -> None:
    put(hub, theirs__txt=b"theirs")
    (model / "notes.txt").write_text("mine")
    done = push(str(model), FIRST)
    assert done.not_sent == ["notes.txt"]
    assert done.notes == ["1 other files of the repository are left as they are: theirs.txt"]
    assert digests(at_hub(hub)).keys() == FILES | {"theirs.txt"}
    pull(FIRST, str(tmp_path / "back"))
    assert digests(tmp_path / "back").keys() == FILES


def test_configuration_and_receipt_come_last_and_a_failed_push_goes_on(
    hub: HubStub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("olm_data.extensions.hub.push.COMMIT_FILES", 1)
    shutil.copy(model / "model.safetensors", model / "second.safetensors")
    with open(model / "second.safetensors", "ab") as file:
        file.write(b" ")  # not the same content
    receipt(model)

    def refuse(sha256: str) -> None:
        if hub.commits.uploaded:
            raise Answer(403, "", "quota")

    hub.commits.on_upload = refuse
    with pytest.raises(StorageError, match="refuses this user"):
        push(str(model), FIRST)
    assert digests(at_hub(hub)).keys() == {"README.md", "model.safetensors"}
    with pytest.raises(InputError, match="no model in this repository"):
        pull(FIRST, str(tmp_path / "half"))
    assert not (tmp_path / "half").exists()
    hub.commits.on_upload = lambda sha256: None
    done = push(str(model), FIRST)
    assert (done.sent, done.kept) == (3, 2)
    assert len(set(hub.commits.uploaded)) == len(hub.commits.uploaded) == 2, "nothing goes twice"
    pull(FIRST, str(tmp_path / "back"))
    assert digests(tmp_path / "back") == digests(model)


def test_a_card_that_somebody_wrote_on_the_hub_stays(
    hub: HubStub, model: Path, tmp_path: Path
) -> None:
    push(str(model), FIRST)
    (model / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    done = push(str(model), FIRST)  # the one there is as exported: ours goes over it
    assert (done.status, (at_hub(hub) / "README.md").read_text()[:12]) == (
        "pushed",
        "---\nlicense:",
    )
    hub.commit("models/lab/first", path="README.md", content="dGhlaXJz")
    done = push(str(model), FIRST)
    assert done.status == "already there"
    assert "README.md of the repository" in done.notes[0]
    pull(FIRST, str(tmp_path / "back"))
    assert (tmp_path / "back/README.md").read_text() == "theirs"


def test_a_receipt_that_names_files_elsewhere_is_refused(
    hub: HubStub, model: Path, tmp_path: Path
) -> None:
    (model / "olm-export.json").write_text(
        (model / "olm-export.json").read_text().replace("model.safetensors", "../model.safetensors")
    )
    with pytest.raises(ValidationError, match="out of its folder"):
        push(str(model), FIRST)
    shutil.copytree(model, at_hub(hub))
    with pytest.raises(ValidationError, match="out of its folder"):
        pull(FIRST, str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


def test_a_file_that_is_a_link_out_of_the_folder_is_refused(
    hub: HubStub, model: Path, tmp_path: Path
) -> None:
    (model / "model.safetensors").rename(tmp_path / "elsewhere")
    (model / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValidationError, match="link to another place"):
        push(str(model), FIRST)


def test_what_is_no_exported_model_is_refused(
    hub: HubStub, model: Path, books: Path, tmp_path: Path
) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="no exported model"):
        push(str(tmp_path / "none"), FIRST)
    with pytest.raises(UsageError, match="address of a model"):
        push(str(books), FIRST)
    with pytest.raises(UsageError, match="address of a dataset"):
        push(str(model), "hf://datasets/lab/first")
    with pytest.raises(UsageError, match="stands in its card"):
        push(str(model), FIRST, licence="mit")
    put(hub, config__json=b'{"model_type": "llama"}')
    with pytest.raises(InputError, match="no exported model"):
        pull(FIRST, str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


def test_each_checkpoint_has_a_branch_of_its_own_beside_another_on_main(
    hub: HubStub, model: Path, tmp_path: Path, olm: Olm
) -> None:
    push(str(model), FIRST)
    hub.commit("models/lab/first", path="theirs.txt", content="dGhlaXJz")
    on_main = digests(at_hub(hub))
    later = {
        f"step{number}": exported_model(tmp_path / f"m{number}", "olmo2", str(number) * 64)
        for number in (1, 2)
    }
    for name, folder in later.items():
        looked = push(str(folder), FIRST, revision=name, dry_run=True)
        done = push(str(folder), FIRST, revision=name)
        assert (done.status, done.sent, done.notes) == ("pushed", looked.sent, [])
        assert done.commit == hub.commits.head("models/lab/first", name)
        assert push(str(folder), FIRST, revision=name).status == "already there"
    for name, folder in later.items():
        pull(f"{FIRST}@{name}", str(tmp_path / f"back-{name}"))
        assert digests(tmp_path / f"back-{name}") == digests(folder)
    assert digests(at_hub(hub)) == on_main
    said = olm("push", later["step2"], FIRST, "--revision", "step1")
    assert said.returncode == 7, said.stderr
    assert "or to a new branch of this one: --revision NAME" in said.stderr
    same = push(str(model), FIRST, revision="v1")  # what main holds begins where main is
    assert (same.status, same.sent) == ("already there", 0)
    assert digests(hub.root / ".states/models/lab/first/v1") == on_main


def test_a_stopped_push_to_a_branch_goes_on(hub: HubStub, model: Path, tmp_path: Path) -> None:
    push(str(model), FIRST)
    other = exported_model(tmp_path / "other", "olmo2", "d" * 64)

    def refuse(sha256: str) -> None:
        raise Answer(403, "", "quota")

    hub.commits.on_upload = refuse
    with pytest.raises(StorageError, match="refuses this user"):
        push(str(other), FIRST, revision="step1")
    hub.commits.on_upload = lambda sha256: None
    with pytest.raises(InputError, match="no model in this repository"):
        pull(f"{FIRST}@step1", str(tmp_path / "half"))
    assert push(str(other), FIRST, revision="step1").status == "pushed"
    pull(f"{FIRST}@step1", str(tmp_path / "back"))
    assert digests(tmp_path / "back") == digests(other)


def test_a_repository_that_began_with_another_model_has_no_empty_branch(
    hub: HubStub, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(exported_model(tmp_path / "other", "olmo2", "d" * 64), at_hub(hub))
    with pytest.raises(ConflictError, match="another model"):
        push(str(model), FIRST, revision="step1")
    assert ("models/lab/first", "step1") not in hub.commits._heads


@pytest.mark.slow
def test_killed_pushes_and_pulls_are_completed_by_the_same_command(
    hub: HubStub, model: Path, tmp_path: Path
) -> None:
    for number in range(4):
        data = (model / "model.safetensors").read_bytes() + bytes([number])
        (model / f"part-{number}.safetensors").write_bytes(data)
    receipt(model)
    process: list[subprocess.Popen[bytes]] = []
    extra = hub.environment(tmp_path / "home")

    def killed(*words: object) -> None:
        command = arguments(*words)
        quiet = subprocess.DEVNULL
        with subprocess.Popen(command, env=environment(extra), stderr=quiet) as running:
            process.append(running)
            assert running.wait(300) == -signal.SIGKILL
        process.clear()

    for uploads in (0, 2, 4):

        def kill(sha256: str, uploads: int = uploads) -> None:
            if len(hub.commits.uploaded) == uploads:
                for each in process:
                    each.send_signal(signal.SIGKILL)
                raise Answer(500, "", "what comes after the kill is not taken")

        hub.commits.on_upload = kill
        killed("push", model, FIRST)
        assert not (at_hub(hub) / "config.json").exists()
        assert not (at_hub(hub) / "olm-export.json").exists()
    hub.commits.on_upload = lambda sha256: None
    done = olm_data("push", model, FIRST, extra=extra)
    assert done.returncode == 0, done.stderr
    assert len(set(hub.commits.uploaded)) == 5

    real = hub.answer

    def stop(method: str, path: str, body: bytes, authorization: str = "") -> object:
        if method == "GET" and "part-2.safetensors" in path and process:
            wait_until((tmp_path / ".back.pulling/README.md").exists, "a file to keep")
            process[0].send_signal(signal.SIGKILL)
        return real(method, path, body, authorization)

    hub.answer = stop  # type: ignore[method-assign]
    killed("pull", FIRST, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    again = olm_data("pull", FIRST, tmp_path / "back", "--json", extra=extra)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["kept"] > 0
    assert digests(tmp_path / "back") == digests(model)
    assert [path.name for path in tmp_path.iterdir() if "pulling" in path.name] == []
