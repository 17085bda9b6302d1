"""The adapter of a version as a file, of a run in a folder of objects, as a process of its own
writes it."""

import asyncio
import errno
import io
import os
import shutil
from pathlib import Path
from typing import cast, get_args
from zipfile import ZipFile

import httpx
import pytest
from fastapi.testclient import TestClient
from safetensors.torch import load

from digenrl.api import commands
from digenrl.api import export_routes as export_module
from digenrl.api.client import Client, Refused
from digenrl.api.export_routes import AdapterLayout, Exports, OpenFile, export_routes
from digenrl.api.run_history import RunHistory
from digenrl.commands.export import Layouts
from digenrl.report.layouts import Layout
from shared.models.lora_files import FILES
from shared.models.lora_names import HIGH
from shared.process.http_access import Access
from shared.process.http_guard import Guard, own_names
from shared.recipe.recipe import load_recipe
from shared.run.layout import recipe_key
from shared.run.retention import version_folders
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.api.served import app_of

MADE, RUN = Path(__file__).parent / "small-run", "tiny"

pytestmark = pytest.mark.filterwarnings("ignore:You should not use the 'timeout' argument")


@pytest.fixture
def exports(tmp_path: Path) -> Exports:
    """Make exports of a copy of a stored run, with the recipe as this release stores it."""
    shutil.copytree(MADE, tmp_path / "objects")
    store = ObjectStore(FolderBackend(tmp_path / "objects"))
    recipe = load_recipe(MADE / "recipe.toml").model_dump_json().encode()
    asyncio.run(store.write(recipe_key(RUN), recipe))
    environment = {**os.environ, "DIGENRL_STORE_URL": f"file://{tmp_path / 'objects'}"}
    return Exports(RunHistory(store, RUN), environment)


@pytest.fixture
def client(exports: Exports) -> Client:
    guard = Guard(
        app_of(export_routes(exports)), own_names("testserver"), access=Access(is_open=True)
    )
    return Client(cast(httpx.Client, TestClient(guard)))


def test_the_adapter_of_a_version_is_a_zip_file_of_what_export_writes(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = exports_of(client.export_version("newest"))
    [weights] = [data for name, data in newest.items() if name.endswith(FILES[HIGH])]
    assert {name.partition("/")[0] for name in newest} == {f"{RUN}-2-diffusers"}
    assert all(name.startswith("transformer.") for name in load(weights))

    async def again(*_: object) -> None:
        raise AssertionError("it was made before")

    monkeypatch.setattr(Exports, "_export", again)
    assert exports_of(client.export_version(2)) == newest


def exports_of(packed: bytes) -> dict[str, bytes]:
    with ZipFile(io.BytesIO(packed)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.slow
def test_what_cannot_be_exported_is_said_with_the_reason(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(version: object) -> tuple[int, str]:
        with pytest.raises(Refused) as found:
            client.export_version(version)  # type: ignore[arg-type]
        return found.value.status, str(found.value)

    assert refusal(9) == (404, "version: there is no 9; the newest is 2")
    assert refusal("oldest")[0] == 422
    for folder in version_folders(RUN):  # the run exports averages, which its checkpoints have
        shutil.rmtree(tmp_path / "objects" / folder)
    status, reason = refusal(1)
    assert status == 409 and "version 1" in reason
    monkeypatch.setattr(commands, "MAX_WAITING_REQUESTS", -1)
    assert refusal(2)[0] == 503


def test_a_file_that_is_deleted_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(b"x" * 5)
    opened = OpenFile.open(path)
    path.unlink()

    async def read() -> bytes:
        return b"".join([chunk async for chunk in opened.chunks()])

    assert (opened.size, asyncio.run(read()), opened.file.closed) == (5, b"x" * 5, True)


def test_a_disk_without_room_is_an_answer(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def written(*_: object) -> None: ...

    def full(_: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Exports, "_export", written)
    monkeypatch.setattr(export_module, "_zipped", full)
    with pytest.raises(Refused, match="No space left on device") as found:
        client.export_version(2)
    assert found.value.status == 503


def test_the_layouts_are_those_of_the_command() -> None:
    assert get_args(AdapterLayout) == get_args(Layouts) == tuple(Layout)
