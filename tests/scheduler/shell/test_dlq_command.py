"""`digenrl dlq` over a scheduler's API, and over the store of a run that is not in progress."""

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import httpx
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner, Result

from digenrl.api.checked_client import CheckedClient
from digenrl.commands import dlq as commands
from digenrl.commands.cli import app
from digenrl.commands.steer import until_paused
from digenrl.local import connection
from digenrl.local.runs import last_address, write_address
from digenrl.reading.letters import advice, detail, line, summary
from services.scheduler.shell.api_letters import DeadLetterDetail, Letters, RunProgress
from services.scheduler.shell.api_models import RunView
from services.scheduler.shell.app import Scheduler
from shared.errors import UserError
from shared.messages.codec import encode
from shared.messages.contracts import FragmentFailed, FragmentSlot
from shared.run.log_entries import DeadLetter, LetterKind, Settled, Work
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.follow.runs import Run
from tests.readings import run
from tests.run_log import append, letter, letters_of


def store_letters(folder: Path, number: int) -> None:
    letters = [
        letter(
            each, reason="reward: no pixels", at=0.0, data=base64.b64encode(b"\xc1bytes").decode(),
            work=Work(batch=0, group=each, first_sample=2),
        )
        for each in range(1, number + 1)
    ]  # fmt: skip
    asyncio.run(append(ObjectStore(FolderBackend(folder)), "test", *letters))


def dlq(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["dlq", *arguments])


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is not in progress, with five letters."""
    monkeypatch.setenv("DIGENRL_STORE_URL", f"file://{tmp_path}")
    Run(tmp_path).begin()
    store_letters(tmp_path, 5)


OVER = "the run is over; `digenrl up RECIPE --resume` resumes it"


@pytest.mark.usefixtures("left")
def test_letters_of_a_run_that_is_over_are_read_in_its_store() -> None:
    listed, why = dlq("list", "test", "--all"), "reward: no pixels"
    assert listed.output.splitlines()[:2] == [
        f"     5  open     attempt failed  step 1 (batch 0), group 5, from sample 2 on: {why}",
        f"     4  open     attempt failed  step 1 (batch 0), group 4, from sample 2 on: {why}",
    ]
    assert dlq("list", "test").output == "     5  reward: no pixels\n"
    assert "message: \\xc1bytes" in dlq("show", "test", "3").output
    assert json.loads(dlq("show", "test", "3", "--json").output)["num_bytes"] == 6
    assert dlq("show", "test", "9").exception
    assert len(json.loads(dlq("list", "test", "--json").output)) == 5
    for action in ("retry", "drop"):
        refused = dlq(action, "test", "4")
        assert (refused.exit_code, refused.output) == (1, f"4: {OVER}\n")


def test_letters_of_a_run_in_progress_are_asked_of_its_scheduler(
    scheduler: Scheduler, client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_letters(tmp_path, 5)

    async def read() -> None:
        writing = asyncio.create_task(scheduler.run_log.write())
        while not scheduler.run_log.letters.letters:  # noqa: ASYNC110
            await asyncio.sleep(0)
        writing.cancel()

    asyncio.run(read())

    @contextmanager
    def here(*_: object, **__: object) -> Iterator[connection.Connection]:
        yield connection.Connection(CheckedClient(cast(httpx.Client, client)), is_live=True)

    monkeypatch.setattr(connection, "connect", here)
    monkeypatch.setattr(commands, "PER_REQUEST", 2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/test").mkdir(parents=True)
    (tmp_path / "runs/test/recipe.json").touch()
    assert dlq("list", "test").output == "no dead letters are open; all: --all\n"
    listed = dlq("list", "test", "--all").output.splitlines()
    assert len(listed) == 5 and listed[0].endswith("[batch 0 is committed]")
    assert "outcome: batch 0 is committed" in dlq("show", "test", "1").output
    assert dlq("drop", "test", "2").output == "2: nobody needs it any more\n"
    assert dlq("drop", "test", "7").output == "7: there is no dead letter 7\n"
    assert dlq("retry", "test", "--all").output == "no such dead letters\n"
    retried = dlq("retry", "test", "1")
    assert retried.exit_code == 1 and retried.output.startswith("1: nothing is left to do: batch")


CAUSE = "reward: mine: ValueError: no template (slow_reward.py, line 7)"


def about(number: int, batch: int, attempt: int = 0, kind: LetterKind = "failed") -> DeadLetter:
    work = Work(batch=batch, group=0, first_sample=4 * attempt, attempt=attempt)
    return letter(number, kind=kind, reason=CAUSE, work=work, at=0.0)


def retried(number: int) -> Settled:
    return Settled(letters=(number,), how="retried", by="ann")


def shown(letters: Letters, phase: str, committed: int = 3) -> list[DeadLetterDetail]:
    letters.progress = lambda: RunProgress(committed, phase)
    return [*letters.newest_first()]


def test_open_letters_are_summed_up_with_the_commands_that_help() -> None:
    opened = shown(letters_of(about(1, 3), about(2, 4, kind="unscored")), "paused")
    retry = "`digenrl dlq retry test --all --resume`"
    [why, remedy] = summary(opened, run(phase="paused"))
    assert why == f"     2  {CAUSE}"
    assert remedy == f"fix the cause, then retry: {retry}"
    assert advice(run()) == (
        f"to fix the cause and retry: `digenrl pause test --at-failure`, then {retry}"
    )
    assert "will be paused" in advice(run(pause_at_failure=True))
    assert summary(opened, None) == [why] and summary([], run()) == []


def test_the_newest_letter_about_a_group_decides_for_all_of_it() -> None:
    letters = letters_of(about(1, 3), about(2, 3, 1, kind="unscored"), about(3, 4))
    states = [(each.state, each.outcome) for each in shown(letters, "running")]
    assert states == [
        ("open", "it is tried again by itself"), ("open", ""), ("over", "see letter 2"),
    ]  # fmt: skip
    assert [each.outcome for each in shown(letters, "paused")] == ["", "", "see letter 2"]
    letters = letters_of(about(1, 3), retried(1), about(2, 3, 1, kind="unscored"))
    oldest = shown(letters, "running")[1]
    assert (oldest.state, oldest.outcome) == ("retried", "see letter 2")
    assert line(oldest).endswith("line 7) [see letter 2]")


def test_what_was_retried_is_done_once_its_batch_is_committed() -> None:
    letters = letters_of(about(4, 3), about(5, 2, kind="unscored"), retried(4))
    outcomes = [each.outcome for each in shown(letters, "running")]
    assert outcomes == ["batch 2 is committed", "being done again"]
    [_, again] = shown(letters, "running", committed=4)
    assert (again.state, again.outcome) == ("retried", "batch 3 is committed")


def test_a_letter_shows_its_message() -> None:
    slot = FragmentSlot(batch=3, group=0, first_sample=4, attempt=0)
    message = encode(FragmentFailed(slot=slot, stage="reward", reason=CAUSE, worker=None))
    data = base64.b64encode(message).decode()
    [found] = shown(letters_of(about(1, 3, 1).model_copy(update={"data": data})), "paused")
    lines = detail(found)
    assert "work: step 4 (batch 3), group 0, from sample 4 on" in lines
    assert "kind: attempt failed" in lines
    assert lines[-1].startswith('message: {"kind":"fragment_failed",')


def test_a_command_without_numbers_says_what_it_needs() -> None:
    assert "NUMBERS: name letters" in str(dlq("drop", "test").exception)


def test_the_address_of_a_run_is_in_its_folder(tmp_path: Path) -> None:
    assert last_address(tmp_path) == ""
    write_address(tmp_path, "http://127.0.0.1:1")
    assert last_address(tmp_path) == "http://127.0.0.1:1"
    with pytest.raises(UserError, match="does not answer"):
        commands.all_letters(CheckedClient.at(last_address(tmp_path)), "open")


def test_a_pause_at_a_failure_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    class Runs:
        """Answers once for each step, and is paused then."""

        phases = iter([("running", True, 3), ("running", True, 3), ("paused", False, 4)])

        def get_run(self) -> RunView:
            phase, asked, step = next(self.phases)
            return RunView.model_construct(phase=phase, pause_at_failure=asked, step=step, steps=9)

    assert until_paused(cast(CheckedClient, Runs())).phase == "paused"
    assert capsys.readouterr().err == "step 3 of 9; waits until something fails\n"
