"""`digenrl fetch` gets of a model what runs read, from a mirror of the hub on this machine."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from digenrl.commands import cli
from digenrl.hub.fetch import fetch
from shared.diffusion.loading.models import load_model
from shared.errors import Unavailable, UserError
from shared.limits import MAX_CONFIG_BYTES
from shared.models.catalogue import check_family, check_weights
from shared.models.hub import cached_commit, place
from shared.recipe.recipe import load_recipe
from shared.run.files import file_digest
from tests import tiny_models
from tests.hub.mirror import TOKEN, Mirror, Repository, in_use
from tests.paths import DIGITS, ROOT

NAME = "tiny/digits-model"
CHUNK = 1 << 16
"""Bytes that a broken download loses at most."""
PARTS = ("scheduler", "text_encoder", "transformer", "vae")
UNREAD = (
    "digits.safetensors", "transformer/diffusion_pytorch_model.fp16.safetensors", "README.md",
    "text_encoder/pytorch_model.bin",
)  # fmt: skip
NETWORK = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with one text encoder, as it would stand on the hub, with files that no run
    reads."""
    folder, demo = tmp_path_factory.mktemp("hub") / "model", ROOT / "models" / "digits"
    index = json.loads((demo / "model_index.json").read_text())
    for part in PARTS:
        shutil.copytree(demo / part, folder / part)
    left_out = [name for name, made in index.items() if name not in PARTS and made[0] != "_"]
    none = {name: [None, None] for name in left_out if isinstance(index[name], list)}
    (folder / "model_index.json").write_text(json.dumps({**index, **none}))
    network = (folder / NETWORK).read_bytes()
    for name in UNREAD[:2]:
        (folder / name).write_bytes(network)
    (folder / "README.md").write_text("# A model")
    (folder / "text_encoder" / "pytorch_model.bin").write_bytes(b"pickle")
    return folder


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", CHUNK)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    with in_use(tmp_path / "home", monkeypatch) as found:
        found.add(NAME, model)
        yield found


def quiet(line: str) -> None:
    pass


def test_only_what_runs_read_is_fetched_and_once(hub: Mirror, model: Path) -> None:
    said: list[str] = []
    folder = fetch(NAME, None, said.append)
    assert folder == place(NAME, None) == place(NAME, cached_commit(folder))
    check_weights(folder)
    assert check_family(folder).pipeline == "StableDiffusion3Pipeline"
    fetched = hub.fetched()
    unread = {file for file in hub.repositories[NAME].files if not (folder / file).is_file()}
    assert unread == set(UNREAD)
    assert len(fetched) == len(set(fetched))
    assert not unread & set(fetched)
    assert f"{len(hub.repositories[NAME].files) - len(UNREAD) - 1} files that runs read" in said[0]
    assert file_digest(folder) == file_digest(model)
    fetch(NAME, None, quiet)
    assert hub.fetched() == fetched


def test_a_broken_download_goes_on_where_it_ended(hub: Mirror) -> None:
    hub.breaks[NETWORK] = 3 * CHUNK + 5
    folder = fetch(NAME, None, quiet)
    ranges = [given for each, file, given in hub.asked if (each, file) == ("GET", NETWORK)]
    assert ranges == [None, f"bytes={3 * CHUNK}-"]
    assert (folder / NETWORK).read_bytes() == hub.repositories[NAME].files[NETWORK]


def test_a_download_whose_process_has_ended_goes_on(
    hub: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends as if the machine had; huggingface_hub does not try again within it."""
    hub.breaks[NETWORK] = 3 * CHUNK + 5
    with monkeypatch.context() as patched:
        patched.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fetch(NAME, None, quiet)
    assert not (place(NAME, None) / "model_index.json").is_file()  # no name before all is here
    folder = fetch(NAME, None, quiet)
    assert [given for each, file, given in hub.asked if (each, file) == ("GET", NETWORK)] == [
        None, f"bytes={3 * CHUNK}-",
    ]  # fmt: skip
    assert (folder / NETWORK).read_bytes() == hub.repositories[NAME].files[NETWORK]
    assert not list(folder.parents[1].glob("blobs/*.partial"))


def test_what_came_damaged_is_not_kept(hub: Mirror) -> None:
    hub.damaged.add(NETWORK)
    with pytest.raises(UserError, match=r"transformer/.* came damaged; run the command again"):
        fetch(NAME, None, quiet)
    hub.damaged.clear()
    check_weights(fetch(NAME, None, quiet))


def test_what_the_hub_refuses_is_one_line_with_the_remedy(
    hub: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories[NAME].gated = True
    hub.repositories["tiny/private"] = Repository(private=True)
    with pytest.raises(
        UserError, match=rf"^model[.]id: {NAME} is gated: accept its terms at {hub.url}"
    ):
        fetch(NAME, None, quiet)
    with pytest.raises(
        UserError, match=r"^model[.]id: there is no tiny/private .* HF_TOKEN if it is"
    ):
        fetch("tiny/private", None, quiet)
    with pytest.raises(UserError, match=r"^model[.]revision: .* has no revision 'v2'"):
        fetch(NAME, "v2", quiet)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    check_weights(fetch(NAME, None, quiet))
    with pytest.raises(UserError, match="tiny/private is not a diffusers model"):
        fetch("tiny/private", None, quiet)


@pytest.mark.parametrize(
    "name", ["gpt2", "org/na me", "https://huggingface.co/org/name", "a/b/c", ""]
)
def test_what_is_no_name_on_the_hub_is_refused(name: str, hub: Mirror) -> None:
    with pytest.raises(UserError, match=r"^model\.id: .* is no name on the hub; give the owner"):
        fetch(name, None, quiet)
    with pytest.raises(UserError, match=r"^model\.revision: 'a b' is no branch, tag or commit"):
        fetch(NAME, "a b", quiet)


def test_without_the_network_it_is_said_what_forbids_it(
    hub: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^HF_HUB_OFFLINE: is set, so that .*; unset it"):
        fetch(NAME, None, quiet)


@pytest.mark.parametrize("index", [b"{nonsense", b"[]"])
def test_an_index_that_is_none_is_said_to_be(index: bytes, hub: Mirror) -> None:
    hub.repositories[NAME].files["model_index.json"] = index
    with pytest.raises(UserError, match=r"^model\.id: .* has a model_index.json that is invalid"):
        fetch(NAME, None, quiet)


def test_a_pipeline_without_an_adapter_is_refused_with_the_reason(hub: Mirror) -> None:
    index = b'{"_class_name": "QwenImageEditPlusPipeline"}'
    hub.repositories[NAME].files["model_index.json"] = index
    with pytest.raises(UserError, match=r"^model\.id: it is a QwenImageEditPlus.*, which takes an"):
        fetch(NAME, None, quiet)


def test_a_blob_that_was_removed_is_fetched_again(hub: Mirror) -> None:
    folder = fetch(NAME, None, quiet)
    (folder / NETWORK).resolve().unlink()
    check_weights(fetch(NAME, None, quiet))


def test_what_has_been_fetched_of_a_file_needs_no_space_again(
    hub: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = (fetch(NAME, None, quiet) / NETWORK).resolve()
    whole = blob.read_bytes()
    blob.with_name(f"{blob.name}.partial").write_bytes(whole[:-10])
    blob.unlink()
    for free, fits in ((9, False), (10, True)):
        usage = type("Usage", (), {"free": free})
        monkeypatch.setattr("digenrl.hub.fetch.shutil.disk_usage", lambda path, of=usage: of)
        if fits:
            check_weights(fetch(NAME, None, quiet))
        else:
            with pytest.raises(UserError, match="of free space, and"):
                fetch(NAME, None, quiet)


def test_a_hub_that_does_not_answer_is_said_to(
    hub: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        Unavailable, match=r"127[.]0[.]0[.]1:9 did not give all of .* run the command"
    ):
        fetch(NAME, None, quiet)


def test_a_full_disk_is_seen_before_the_weights_are_asked_for(
    hub: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("digenrl.hub.fetch.shutil.disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="of free space, and"):
        fetch(NAME, None, quiet)
    assert NETWORK not in hub.fetched()


def test_a_host_may_keep_models_in_a_folder_of_its_own(
    hub: Mirror, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = fetch(NAME, None, quiet)
    monkeypatch.setenv("DIGENRL_MODELS", str(tmp_path / "models"))
    assert place(NAME, None) == cached  # what the cache has is taken
    monkeypatch.setenv("HF_HOME", str(tmp_path / "other"))
    by_hand = tmp_path / "models" / NAME
    by_hand.parent.mkdir(parents=True)
    by_hand.symlink_to(model)
    assert place(NAME, None) == by_hand
    assert place(NAME, "v2") != by_hand  # nobody knows which revision it is
    own = fetch(NAME, None, quiet)
    assert own == place(NAME, None)
    assert own.is_relative_to(tmp_path / "models")


def recipe_of(folder: Path, *lines: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text("\n".join((f'base = "{DIGITS}"', *lines)))
    return path


def test_a_recipe_names_a_model_by_its_id(hub: Mirror, tmp_path: Path) -> None:
    path = recipe_of(tmp_path, f'model.id = "{NAME}"')
    before = load_recipe(path).model
    assert (before.id, before.revision, before.name) == (NAME, None, "digits-model")
    with pytest.raises(UserError, match=f"^model.id: {NAME} is not on this host; fetch it with: "):
        check_family(before.folder)
    folder = fetch(NAME, None, quiet)
    after = load_recipe(path).model
    assert (after.folder, after.revision) == (folder, cached_commit(folder))
    (folder / NETWORK).unlink()
    command = f"digenrl fetch {NAME} --revision {cached_commit(folder)}"
    with pytest.raises(UserError, match=f"{NAME} lacks transformer/.* fetch it with: {command}$"):
        check_weights(after.folder)


def test_a_model_has_one_name(hub: Mirror, tmp_path: Path) -> None:
    both = recipe_of(tmp_path, "[model]", f'id = "{NAME}"', 'folder = "here"')
    with pytest.raises(UserError, match=r"^model.folder, model.id: set one of the two, not both"):
        load_recipe(both)
    with pytest.raises(UserError, match=r"model.revision: needs model.id"):
        load_recipe(recipe_of(tmp_path, 'model.revision = "v1"'))
    chosen = load_recipe(
        recipe_of(tmp_path, f'model.id = "{NAME}"', 'model.revision = "v1"'),
        {"model.revision": "v2", "model.id": "tiny/other"},
    ).model
    assert (chosen.id, chosen.revision) == ("tiny/other", "v2")
    again = load_recipe(
        recipe_of(tmp_path, f'model.id = "{NAME}"'), {"model.folder": "/here"}
    ).model
    assert (again.id, again.folder) == (None, Path("/here"))


def test_the_command_fetches_what_a_recipe_names(
    hub: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe_of(tmp_path, 'model.id = "tiny/other"')
    words = ["digenrl", "fetch", str(path), "--model.id", NAME]
    with mock.patch.object(sys, "argv", words), pytest.raises(SystemExit):
        cli.main()
    assert Path(capsys.readouterr().out.strip()) == place(NAME, None)
    assert (place(NAME, None) / "model_index.json").is_file()


@pytest.mark.slow
def test_a_part_s_files_without_weights_are_all_fetched(hub: Mirror, tmp_path: Path) -> None:
    """Tokenizers of FLUX.2, Z-Image and HunyuanVideo-1.5 have their chat template in a file."""
    folder = tiny_models.save("flux2-klein", tmp_path / "model")
    assert (folder / "tokenizer" / "chat_template.jinja").is_file()
    other = "tokenizer/additional_chat_templates/other.jinja"
    (folder / other).parent.mkdir()
    (folder / other).write_text("{{ messages }}")
    (folder / "text_encoder" / "model.onnx").write_bytes(b"weights")
    (folder / "text_encoder" / "onnx").mkdir()
    (folder / "text_encoder" / "onnx" / "model.safetensors").write_bytes(b"weights")
    (folder / "vae" / "huge.json").write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    files = hub.add("tiny/klein", folder).files
    fetched = fetch("tiny/klein", None, quiet)
    assert {name for name in files if not (fetched / name).exists()} == {
        "text_encoder/model.onnx", "text_encoder/onnx/model.safetensors", "vae/huge.json",
    }  # fmt: skip
    whole = {"transformer", "text", "decoder"}
    model = load_model(fetched, whole, device=torch.device("cpu"), dtype=torch.float32)  # type: ignore[arg-type]
    assert model.encode("a cat", guidance=1.0)["text"].isfinite().all()
    before = file_digest(fetched)
    (fetched / "tokenizer" / "chat_template.jinja").unlink()
    assert file_digest(fetched) != before, "conditions depend on it"
