"""Commands that look at a run and steer it, over the API of a scheduler in mid-run and over the
store of one that is over."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import httpx
import pytest
import typer
from fastapi.testclient import TestClient
from typer.testing import CliRunner, Result

from digenrl.api.checked_client import CheckedClient
from digenrl.commands import cli
from digenrl.commands.steer import until_drained
from digenrl.local import connection
from digenrl.local.runs import Run, RunProgress, write_address
from services.scheduler.core.machine import step
from services.scheduler.shell.api import create_app
from services.scheduler.shell.api_models import WorkerView
from services.scheduler.shell.app import Scheduler
from services.scheduler.shell.roster import LastStatus
from shared.errors import UserError
from shared.messages.workers import WorkerStatus
from tests.api.past_run import past_run
from tests.follow.runs import RUN
from tests.scheduler.shell.conftest import folder, scheduler
from tests.scheduler.shell.served import Outbox
from tests.view.stored import stored_run

__all__ = ["folder", "scheduler"]  # fixtures


def run(*arguments: str) -> Result:
    found = CliRunner().invoke(cli.app, arguments)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found


@pytest.fixture
def live(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    """A run in progress on two hosts, whose API the commands find."""
    for name, service, host in (("rollout-0", "rollout", "a"), ("reward-0", "reward", "b")):
        status = WorkerStatus.model_validate({
            "service": service, "worker": name, "address": f"{name}-a", "host": host,
            "activity": "scoring",
        })  # fmt: skip
        scheduler.roster.statuses[f"{name}-a"] = LastStatus(status, 0.0)

    @contextmanager
    def client_of(*_: object, **__: object) -> Iterator[CheckedClient]:
        yield CheckedClient(cast(httpx.Client, TestClient(create_app(scheduler))))

    monkeypatch.setattr(connection, "connect_client", client_of)
    return scheduler


def test_a_host_is_drained_and_what_cannot_be_is_said(live: Scheduler) -> None:
    shown = run("workers", "demo").output.splitlines()
    assert [line.split()[:3] for line in shown] == [
        ["worker", "service", "host"], ["reward-0", "reward", "b"], ["rollout-0", "rollout", "a"],
    ]  # fmt: skip
    done = run("workers", "demo", "--host", "a", "--drain", "--no-wait")
    assert (done.exit_code, done.output) == (
        0,
        "rollout-0: it finishes what it has, and gets nothing new\n",
    )
    [request] = cast(Outbox, live.bus).published
    live.state, _ = step(live.plan, live.state, request, 2.0)  # type: ignore[arg-type]
    assert "draining" in run("workers", "demo", "rollout-0").output
    assert json.loads(run("workers", "demo", "--json").output)[1]["drain"] == "draining"
    refused = run("workers", "demo", "reward-0", "--drain")
    assert refused.exit_code == 1 and "SIGTERM" in refused.output
    for arguments, fault in (
        (["nobody"], "NAMES: nobody is unknown; use some of reward-0, rollout-0"),
        (["a", "--drain"], "NAMES: a is a host: write --host a"),
        (["--host", "c"], "--host: c is unknown; use one of a, b"),
        (["--drain"], "NAMES: name workers, or a host"),
    ):
        with pytest.raises(UserError, match=fault):
            run("workers", "demo", *arguments)


def test_a_drain_is_waited_for_until_the_workers_have_no_work(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Workers:
        """Answers with what a drained worker goes through."""

        states = iter([["no", "no"], ["draining", "drained"], ["drained", "no"]])

        def list_workers(self) -> list[WorkerView]:
            return [
                WorkerView.model_construct(worker=name, drain=drain)
                for name, drain in zip(("a", "b"), next(self.states), strict=True)
            ]

    drained = until_drained(cast(CheckedClient, Workers()), ["a"])
    assert drained == ["a: drained, has no work"]
    assert capsys.readouterr().err == "waits until a has finished\n"
    assert until_drained(cast(CheckedClient, Gone()), ["a"]) == ["a: is gone"]


class Gone:
    def list_workers(self) -> list[WorkerView]:
        return []


def test_tag_is_shown_and_chosen_and_a_run_is_paused(live: Scheduler) -> None:
    assert run("tag", "demo").output.startswith("mode auto; 0 of 0 members lent")
    assert "asked for: off" in run("tag", "demo", "off").output
    run("tag", "demo", "1")
    assert "pause is asked for" in run("pause", "demo").output
    kinds = [(each.kind, getattr(each, "mode", "")) for each in cast(Outbox, live.bus).published]
    assert kinds == [("tag_request", "off"), ("tag_request", "fixed"), ("operator_request", "")]
    with pytest.raises(UserError, match="MODE: 'much' is unknown; use auto"):
        run("tag", "demo", "much")


def test_a_run_that_is_over_shows_versions_samples_and_who_has_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    past_run(tmp_path)
    monkeypatch.setenv("DIGENRL_STORE_URL", f"file://{tmp_path}")
    names, newest, first = run("versions", RUN).output.splitlines()
    assert names.split()[0] == "version" and newest.split()[0] == "1" and first.split()[0] == "0"
    assert "deleted" in newest and "evaluated" in names
    above, names, first, *_, unscored = run("samples", RUN, "0").output.splitlines()
    assert above.startswith("1 sample has no score: group 1 (")
    assert above.endswith(f"to see them: digenrl samples {RUN} --step 1 --order unscored")
    assert names.split()[:2] == ["group/sample", "reward"]
    assert first.split()[:6] == ["0/3", "0.000", "1", "x", "proxy", "0.000"]
    assert "could not be scored" in unscored and "dead letters 1" in unscored
    alone = run("samples", RUN, "0", "--order", "unscored").output.splitlines()
    assert [line.split()[0] for line in alone] == ["group/sample", "1/0"]
    more = run("samples", RUN, "--order", "best", "--limit", "1").output.splitlines()[-1]
    said = f"digenrl samples {RUN} --step 1 --order best --limit 1 --after 1"
    assert more == f"more: {said}", "typed as it is, it goes on with the same step"
    page = json.loads(run("samples", RUN, "0", "--order", "best", "--limit", "1", "--json").output)
    assert page["samples"][0]["reward"] == 1.0 and page["next"] == "1"
    assert run("audit", RUN).output == "nobody has asked for anything\n"
    assert run("samples", RUN).output == run("samples", RUN, "0").output, "the newest batch"
    assert json.loads(run("samples", RUN, "--step", "1", "--json").output)["next"] is None
    for arguments, fault in (
        (["7"], "BATCH: batch 7 is not committed yet; the newest is 0"),
        (["--step", "7"], "--step: step 7 is not trained yet; the newest is 1"),
        (["0", "--step", "1"], "BATCH: name a batch, or with --step"),
    ):
        with pytest.raises(UserError, match=fault):
            run("samples", RUN, *arguments)


def test_the_figure_that_the_best_version_is_chosen_by_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_run(tmp_path / "better", timelines=False, gold=0.1)
    monkeypatch.setenv("DIGENRL_STORE_URL", f"file://{tmp_path}/better/objects")
    lines = run("versions", RUN).output.splitlines()
    assert " 0.900 best " in lines[1] and "best" not in lines[5]
    assert lines[-2] == (
        "evaluated: gold reward other; versions that are not evaluated do not count, and of equal "
        "ones the older is the best"
    )
    stored_run(tmp_path / "equal", timelines=False)
    monkeypatch.setenv("DIGENRL_STORE_URL", f"file://{tmp_path}/equal/objects")
    assert "0.500 best so far: the model before training" in run("versions", RUN).output
    older = run("versions", RUN, "--limit", "2").output.splitlines()[-1]
    assert older == f"older ones: digenrl versions {RUN} --limit 2 --before 3"


def test_the_help_lists_every_command_by_its_task_and_says_the_exit_codes() -> None:
    command = typer.main.get_command(cli.app)
    named = [name for names in cli.TASKS.values() for name in names]
    assert sorted(named) == sorted(command.commands)  # type: ignore[attr-defined]
    text = " ".join(run("--help").output.split())
    assert "Steer a run: pause" in text and "Exit codes: 0 done" in text


def test_a_shell_completes_commands_and_names_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("demo", "digits"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.json").touch()
    monkeypatch.chdir(tmp_path)

    def completed(words: str) -> list[str]:
        asked = {
            "_DIGENRL_COMPLETE": "complete_bash", "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
        }  # fmt: skip
        return CliRunner().invoke(cli.app, [], env=asked, prog_name="digenrl").output.split()

    assert completed("digenrl wor") == ["workers"]
    assert completed("digenrl samples d") == ["demo", "digits"]


def test_a_client_of_a_run_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--scheduler: .* is no run of `digenrl up`"):
        connection.connect_client(Run("demo", "demo", tmp_path))
    with pytest.raises(UserError, match=r"--token-file: .* No such file"):
        connection.connect_client(Run("demo", "demo", tmp_path), "http://x", tmp_path / "none")
    write_address(tmp_path, "http://127.0.0.1:1")
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "viewer.token").write_text("secret\n")
    headers = connection.connect_client(Run("demo", "demo", tmp_path)).http.headers
    assert headers["authorization"] == "Bearer secret"
    RunProgress("finished", 3, 3, 0.5).write(tmp_path)
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(UserError) as refused:
        connection.connect_client(Run("demo", "demo", tmp_path, is_local=True))
    assert str(refused.value) == (
        "RUN: demo is not in progress: finished at step 3 of 3; "
        f"`digenrl status {tmp_path}` shows it"
    )
