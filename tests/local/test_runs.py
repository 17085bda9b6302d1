"""Commands find a run by its name, its folder, and its prefix in a store."""

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from digenrl.commands import cli
from digenrl.local.checking import preflight
from digenrl.local.runs import (
    RunProgress,
    find_run,
    lock_run,
    noted_failure,
    noted_store,
    read_progress,
    runs_in,
)
from digenrl.local.store import run_store
from shared.errors import UserError
from shared.process.settings import Endpoints
from shared.recipe.recipe import load_recipe
from shared.store import open_store
from tests.follow.runs import RUN, Run
from tests.paths import DIGITS
from tests.stored_recipe import store_recipe


def invoke(*arguments: str) -> Result:
    found = CliRunner().invoke(cli.app, arguments)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


def local(runs: Path, name: str) -> Path:
    """Return the folder of a run that `digenrl up` has prepared and left."""
    prepared = preflight.prepare(preflight.UpRequest(DIGITS, {"run.name": name}, False, 0, runs))
    prepared.lock.close()
    return prepared.folder


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The prefix of a run in a store that is a folder, and the only thing that is there of it."""
    run = Run(tmp_path / "objects").begin()
    run.commit(3)
    return tmp_path / "objects" / RUN


@pytest.mark.slow
@pytest.mark.broker
def test_a_run_whose_folder_is_renamed_is_found_by_the_new_name_and_by_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = local(tmp_path / "runs", "cc")
    with run_store(find_run("cc", folder.parent)):
        recipe = load_recipe(DIGITS, {"run.name": "cc"})
        asyncio.run(store_recipe(open_store(Endpoints().store), recipe))
    renamed = folder.rename(folder.with_name("cc.1"))
    monkeypatch.chdir(tmp_path)
    for given in ("cc.1", "runs/cc.1", str(renamed), f"{renamed}/"):
        assert invoke("status", given).output.startswith(f"{given}: not begun; step 0 of 30")
    monkeypatch.chdir(tmp_path / "runs")
    assert "nothing to delete" in invoke("gc", "cc.1", "--dry-run").output
    assert "nobody has asked" in invoke("audit", ".." + "/runs/cc.1").output
    monkeypatch.chdir(renamed)
    assert "no dead letters" in invoke("dlq", "list", ".").output


@pytest.mark.parametrize("given", ["{stored}", "file://{stored}", "{stored}/"])
def test_a_prefix_of_a_store_names_a_run(stored: Path, given: str) -> None:
    given = given.format(stored=stored)
    assert invoke("status", given).output.startswith(f"{given}: not running; stopped after step 3")
    assert len(json.loads(invoke("versions", given, "--json").output)) == 4
    assert "no dead letters" in invoke("dlq", "list", given).output
    assert json.loads(invoke("watch", given, "--json").output)["step"] == 3
    with pytest.raises(UserError, match=r"--scheduler: .* is no run of `digenrl up`"):
        invoke("pause", given)
    assert "DIGENRL_STORE_URL" not in os.environ


def test_status_of_a_finished_run_names_the_report_in_progress(tmp_path: Path) -> None:
    run = Run(tmp_path / "objects").begin()
    run.commit(3)
    folder = local(tmp_path / "runs", RUN)
    RunProgress("reporting", 3, 3).write(folder)
    environment = {"DIGENRL_STORE_URL": (tmp_path / "objects").as_uri()}
    with lock_run(folder.parent, folder.name), noted_store(folder, environment):
        lines = invoke("status", str(folder)).output.splitlines()
    assert lines[1] == "`digenrl up` evaluates the first and the last version, for the report."
    assert "for the report" not in invoke("status", str(tmp_path / "objects" / RUN)).output


def test_a_bucket_s_prefix_is_a_store_and_a_run(tmp_path: Path) -> None:
    found = find_run("s3://bucket/team/demo/", tmp_path)
    assert (found.id, found.store_url, found.is_local) == ("demo", "s3://bucket/team", False)
    with run_store(found):
        assert Endpoints().store_url == "s3://bucket/team"


def test_a_folder_is_a_run_also_where_the_environment_names_another_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = local(tmp_path, "mine")
    monkeypatch.setenv("DIGENRL_STORE_URL", "file:///elsewhere")
    assert find_run(str(folder), tmp_path).is_local
    assert not find_run("mine", tmp_path).is_local
    with pytest.raises(UserError, match="RUN: name the run"):
        find_run("", tmp_path, reads=True)


def test_what_only_reads_takes_the_newest_run_and_what_changes_asks_which(tmp_path: Path) -> None:
    for at, name in enumerate(("b", "a", "c")):
        recipe = local(tmp_path, name) / "recipe.json"
        os.utime(recipe, (at, at))
    assert [folder.name for folder in runs_in(tmp_path)] == ["c", "a", "b"]
    assert find_run("", tmp_path, reads=True).name == "c"
    with pytest.raises(UserError, match=r"RUN: name the run \(one of a, b, c\)"):
        find_run("", tmp_path)


@pytest.mark.parametrize("given", ["cc.1", "no such run", "../x", "s3://bucket/a b", "ü", "cc/"])
def test_a_name_that_no_run_has_is_one_line(tmp_path: Path, given: str) -> None:
    with pytest.raises(UserError, match=f"RUN: there is no run '{given}'"):
        find_run(given, tmp_path)


def commands(of: typer.Typer) -> Iterator[tuple[list[str], object]]:
    """Yield all commands, by the words that name them."""
    group = typer.main.get_command(of)
    for name, each in group.commands.items():  # type: ignore[attr-defined]
        if hasattr(each, "commands"):
            yield from (([name, word], inner) for word, inner in each.commands.items())
        else:
            yield [name], each


WITH_RUNS = [
    words for words, each in commands(cli.app)
    if any(option.envvar == "DIGENRL_RUNS" for option in each.params)  # type: ignore[attr-defined]
]  # fmt: skip


@pytest.mark.parametrize("words", WITH_RUNS, ids=" ".join)
def test_a_file_in_place_of_the_folder_of_runs_is_one_line(
    tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "runs"):
        with pytest.raises(UserError, match=f"--runs: {path} is no folder"):
            invoke(*words, "--runs", str(path), *["x"] * 2)


def test_the_variable_names_the_folder_of_runs_for_each_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = local(tmp_path / "kept", "mine")
    (folder / "logs" / "trainer-0.log").write_text("hello\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DIGENRL_RUNS", "kept")
    assert invoke("logs").output == invoke("logs", "mine").output == "trainer-0 info: hello\n"
    assert len(WITH_RUNS) >= 28


def test_a_run_that_ends_by_an_error_keeps_the_reason(tmp_path: Path) -> None:
    RunProgress("running", 3, 30).write(tmp_path)
    with pytest.raises(UserError), noted_failure(tmp_path):
        raise UserError("trainer-0 ended with status 2: no GPU")
    found = read_progress(tmp_path)
    assert (found.state, found.step) == ("failed", 3)
    assert found.failure == "trainer-0 ended with status 2: no GPU"
