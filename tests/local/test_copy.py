"""`digenrl copy`: a run in a folder to another store, and what is refused in one line."""

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from digenrl.commands.cli import app
from digenrl.local.processes.ports import free_ports
from digenrl.local.runs import find_run
from shared.errors import UserError
from shared.run.commits import commit_chain
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.shared.run.test_garbage import RUN, begin


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The folder of a run of three versions, in a store that is a folder."""

    async def train() -> None:
        _, trainer, _ = await begin(ObjectStore(FolderBackend(tmp_path / "store")))
        for _ in range(3):
            await trainer.step()

    asyncio.run(train())
    return tmp_path / "store" / RUN


def copy(run: Path, store: str | Path, runs: str = "runs") -> str:
    ran = CliRunner().invoke(app, ["copy", str(run), str(store), "--runs", runs])
    if ran.exception is not None:
        raise ran.exception
    return ran.output


def test_a_copy_is_found_as_a_run_and_says_its_version(stored: Path, tmp_path: Path) -> None:
    line = copy(stored, tmp_path / "a backup#1")
    assert line.startswith(f"{RUN}: version 2 is in {tmp_path}/a backup#1, verified: ")
    found = find_run(str(tmp_path / "a backup#1" / RUN), tmp_path)
    assert not found.is_local and found.store_url.endswith("/a%20backup%231")
    copied = ObjectStore(FolderBackend(tmp_path / "a backup#1"))
    assert len(asyncio.run(commit_chain(copied, RUN))) == 3


@pytest.mark.parametrize(
    ("run", "store", "words"),
    [
        ("nothing", "backup", r"RUN: there is no run .*nothing'; `digenrl runs` lists them"),
        ("store/digits", "file", r"Not a directory.*; the same command continues the copy"),
        ("store/digits", "store", "STORE: .*store has the run itself; name another store"),
        ("store/digits", "store/digits/backup", "backup has the run itself; name another store"),
        ("store/digits", "s3:/bucket", "STORE: 's3:/bucket' is neither a folder nor a bucket"),
        ("store/digits", "", "STORE: '' is neither a folder nor a bucket"),
        ("store/digits", "ftp://there", r"'ftp://there' is neither file:///folder nor one of s3:"),
    ],
)
def test_what_cannot_be_copied_is_named_in_one_line(
    stored: Path, tmp_path: Path, run: str, store: str, words: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=words) as error:
        copy(tmp_path / run, store if ":/" in store or not store else tmp_path / store)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_bucket_that_does_not_answer_is_named_in_one_line(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIGENRL_S3_ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setenv("DIGENRL_S3_ACCESS_KEY", "me")
    monkeypatch.setenv("DIGENRL_S3_SECRET_KEY", "secret")
    with pytest.raises(
        UserError, match=r"STORE: its store does not answer; the same command"
    ) as error:
        copy(stored, "s3://bucket/backup")
    assert "\n" not in str(error.value)
