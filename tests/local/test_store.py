"""A local run that has ended can be looked at without any variable."""

import asyncio
import os
from pathlib import Path

import pytest

from digenrl.local.checking import preflight
from digenrl.local.runs import (
    STORE_NOTE,
    Run,
    RunInProgress,
    find_run,
    in_progress,
    lock_run,
    noted_store,
)
from digenrl.local.store import run_store
from shared.errors import UserError
from shared.process.settings import Endpoints
from shared.recipe.recipe import load_recipe
from shared.run.run_recipe import read_recipe
from shared.store import open_store
from tests.paths import DIGITS
from tests.stored_recipe import store_recipe


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The folder of a run that `digenrl up` has prepared and left."""
    request = preflight.UpRequest(DIGITS, {}, resume=False, port=0, runs=tmp_path / "runs")
    local = preflight.prepare(request)
    local.lock.close()
    return local.folder


def at(folder: Path) -> Run:
    return find_run(str(folder), folder.parent)


@pytest.mark.broker
def test_the_store_of_a_run_is_there_for_a_command_and_gone_after_it(left: Path) -> None:
    recipe = load_recipe(DIGITS)
    with run_store(at(left)) as store:
        asyncio.run(store_recipe(store, recipe))
    assert "DIGENRL_STORE_URL" not in os.environ
    with run_store(at(left)):
        assert asyncio.run(read_recipe(open_store(Endpoints().store), "digits")) == recipe


@pytest.mark.broker
def test_while_its_page_is_looked_at_other_commands_read_the_store_as_well(left: Path) -> None:
    recipe = load_recipe(DIGITS)
    with run_store(at(left)):
        asyncio.run(store_recipe(open_store(Endpoints().store), recipe))
        for name in [name for name in os.environ if name.startswith("DIGENRL_S")]:
            del os.environ[name]  # as in another process
        with run_store(at(left)):
            assert asyncio.run(read_recipe(open_store(Endpoints().store), "digits")) == recipe
    assert not list(left.glob("keys/store.json"))


def test_a_run_that_goes_on_keeps_its_store_to_itself(left: Path) -> None:
    with (
        lock_run(left.parent, left.name),
        pytest.raises(UserError, match="in progress in another process"),
        run_store(at(left)),
    ):
        raise AssertionError("two had the store")


def test_a_run_that_is_only_read_names_the_process_that_reads_it(left: Path) -> None:
    with lock_run(left.parent, left.name), noted_store(left, {}, is_live=False):
        reader = rf"digits' is open in `digenrl view` .* end its process {os.getpid()}$"
        with pytest.raises(RunInProgress, match=reader):
            lock_run(left.parent, left.name)
        assert not in_progress(left)
        (left / STORE_NOTE).write_text(f"[{2**22 + 1}, false, {{}}]")
        with pytest.raises(RunInProgress, match="is in progress in another process"):
            lock_run(left.parent, left.name)


def test_what_only_reads_finds_the_store_of_a_run_that_goes_on(left: Path) -> None:
    with lock_run(left.parent, left.name):
        with pytest.raises(RunInProgress), run_store(at(left), reads=True):
            pass
        with noted_store(left, {"DIGENRL_STORE_URL": "s3://here"}):
            assert (left / "keys" / "store.json").stat().st_mode & 0o077 == 0
            with run_store(at(left), reads=True):
                assert os.environ["DIGENRL_STORE_URL"] == "s3://here"
            with pytest.raises(RunInProgress), run_store(at(left)):
                pass  # whoever changes what is stored waits for the end
        with pytest.raises(RunInProgress), run_store(at(left), reads=True):
            pass
    assert "DIGENRL_STORE_URL" not in os.environ


def test_a_store_that_the_settings_name_is_left_alone(
    left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIGENRL_STORE_URL", "file:///somewhere")
    with run_store(find_run("digits", left.parent)):
        assert Endpoints().store_url == "file:///somewhere"


def test_a_command_that_is_told_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"RUN: name the run \(.*runs/ has no runs\)"):
        find_run("", tmp_path / "runs", reads=True)
