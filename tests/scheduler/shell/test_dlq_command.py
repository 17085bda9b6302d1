"""`digenrl dlq` over a scheduler's API, and over the store of a run that is not in progress."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import httpx
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner, Result

from digenrl.checked_client import CheckedClient
from digenrl.cli import app
from digenrl.commands import dlq as commands
from digenrl.commands.steer import until_paused
from digenrl.local import connection
from digenrl.local.address import last_address, write_address
from digenrl.reading.letters import Letter, advice, detail, is_useful, line, reasons
from services.scheduler.shell.api_letters import letter_view
from services.scheduler.shell.api_models import RunView
from services.scheduler.shell.app import Scheduler
from shared.errors import UserError
from shared.messages.codec import encode
from shared.messages.contracts import FragmentFailed, FragmentSlot
from shared.run.dead_letters import (
    DeadLetter,
    Kind,
    LetterOutcomes,
    RunProgress,
    Work,
    add_letter,
    encoded,
)
from shared.store import ObjectStore
from shared.store.folder import FolderBackend
from tests.follow.runs import Run


def store_letters(folder: Path, number: int) -> None:
    store = ObjectStore(FolderBackend(folder))
    for each in range(1, number + 1):
        letter = DeadLetter(
            number=each, digest=f"{each:064d}", kind="failed", stream="DG_EVT",
            subject="dg.test.evt.fragment_failed", reason="reward: no pixels",
            work=Work(batch=0, group=each, first_sample=2), found=0.0, data=encoded(b"\xc1bytes"),
        )  # fmt: skip
        assert asyncio.run(add_letter(store, "test", letter))


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
    listed, why = dlq("list", "test", "--limit", "2"), "reward: no pixels"
    assert listed.output.splitlines() == [
        f"     5  open     attempt failed  step 1 (batch 0), group 5, from sample 2 on: {why}",
        f"     4  open     attempt failed  step 1 (batch 0), group 4, from sample 2 on: {why}",
        "3 older ones: --limit 5",
    ]
    assert dlq("list", "test").output == "     5  newest 5: reward: no pixels\n"
    assert "message: \\xc1bytes" in dlq("show", "test", "3").output
    assert json.loads(dlq("show", "test", "3", "--json").output)["num_bytes"] == 6
    assert dlq("show", "test", "9").exception
    assert len(json.loads(dlq("list", "test", "--json").output)) == 5
    for action in ("retry", "drop"):
        refused = dlq(action, "test", "4")
        assert (refused.exit_code, refused.output) == (1, f"4: {OVER}\n")


@pytest.mark.usefixtures("left")
def test_the_name_of_a_run_takes_the_options_of_the_list() -> None:
    listed = dlq("test", "--limit", "2").output
    assert listed == dlq("list", "test", "--limit", "2").output and listed.startswith("     5")
    assert json.loads(dlq("test", "--json").output)[0]["number"] == 5


def test_letters_of_a_run_in_progress_are_asked_of_its_scheduler(
    scheduler: Scheduler, client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_letters(tmp_path, 5)

    async def read() -> None:
        keeping = asyncio.create_task(scheduler.dead_letters.keep())
        while not scheduler.dead_letters.kept.letters:  # noqa: ASYNC110
            await asyncio.sleep(0)
        keeping.cancel()

    asyncio.run(read())

    @contextmanager
    def here(*_: object, **__: object) -> Iterator[connection.Connection]:
        yield connection.Connection(CheckedClient(cast(httpx.Client, client)), is_live=True)

    monkeypatch.setattr(connection, "connect", here)
    monkeypatch.setattr(commands, "PER_REQUEST", 2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/test").mkdir(parents=True)
    (tmp_path / "runs/test/recipe.json").touch()
    assert dlq("test").output == "none is open; all 5: --all\n"
    listed = dlq("list", "test", "--all").output.splitlines()
    assert len(listed) == 5 and listed[0].endswith("[done since: batch 0 is committed]")
    assert "outcome: done since" in dlq("show", "test", "1").output
    assert dlq("drop", "test", "2").output == "2: nobody needs it any more\n"
    assert dlq("drop", "test", "7").output == "7: there is no dead letter 7\n"
    assert dlq("retry", "test", "--all").output == "no such dead letters\n"
    retried = dlq("retry", "test", "1")
    assert retried.exit_code == 1 and retried.output.startswith("1: nothing is left to do: done")


CAUSE = "mine: ValueError: no template (slow_reward.py, line 7)"


def about(number: int, batch: int, attempt: int = 0, kind: Kind = "failed") -> DeadLetter:
    return DeadLetter(
        number=number, digest=f"{number:064d}", kind=kind, stream="DG_EVT", subject="s", data="",
        reason=CAUSE if kind == "unscored" else f"reward: {CAUSE}", found=0.0,
        work=Work(batch=batch, group=0, first_sample=4, attempt=attempt),
    )  # fmt: skip


def kept(*letters: DeadLetter) -> LetterOutcomes:
    found = LetterOutcomes()
    for each in letters:
        found.add(each)
    return found


def shown(letters: LetterOutcomes, phase: str, committed: int = 3) -> list[Letter]:
    now = RunProgress(committed, phase)
    return [letter_view(each).model_dump() for each in letters.newest_first(now)]


def advised(letters: LetterOutcomes, phase: str) -> list[str]:
    return advice({"run": "demo", "phase": phase}, shown(letters, phase))


def test_advice_names_the_commands_and_what_to_fix_first() -> None:
    done, under_way = about(1, 2), about(2, 3)
    fix = "first fix what makes slow_reward.py line 7 fail. "
    steps, first = advised(kept(done, under_way), "running")
    assert steps == (
        "to fix what fails, and retry it: `digenrl pause demo --at-failure`, then `digenrl dlq "
        "retry demo --all --resume`"
    )
    assert first.startswith(fix)
    assert advised(kept(done), "running") == [], "it fails no more"
    now = done.model_copy(update={"found": time.time()})
    assert advised(kept(now), "running") == [steps]
    first, retry = advised(kept(done, under_way), "paused")
    assert first.startswith(fix)
    assert retry == "once it is fixed: `digenrl dlq retry demo --all --resume`"
    assert advised(kept(under_way), "failed")[1] == retry.replace(" --resume", "")
    [again] = advised(kept(done), "paused")
    assert again.endswith("`digenrl pause demo --at-failure`, then `digenrl resume demo`")
    refused = under_way.model_copy(update={"work": None, "kind": "refused"})
    assert advised(kept(refused), "running")[0].endswith("`digenrl dlq drop demo --all`")
    assert advised(kept(done), "") == []


def test_the_newest_letter_of_a_piece_of_work_decides_for_all_of_it() -> None:
    letters = kept(about(1, 3), about(2, 3, 1, kind="unscored"), about(3, 4))
    states = [(each["state"], each["outcome"]) for each in shown(letters, "running")]
    assert states == [
        ("open", "it is tried again by itself"), ("open", ""), ("over", "see letter 2"),
    ]  # fmt: skip
    assert [each["number"] for each in shown(letters, "paused") if is_useful(each)] == [3, 2]
    letters.settle(1, "retried")
    oldest = shown(letters, "running", committed=4)[2]
    assert (oldest["state"], oldest["outcome"]) == ("retried", "failed again: see letter 2")
    assert line(oldest).endswith("line 7) [failed again: see letter 2]")


def test_what_was_retried_is_done_once_its_batch_is_committed() -> None:
    letters = kept(about(4, 3), about(5, 2, kind="unscored"))
    letters.settle(4, "retried")
    unscored, retried = shown(letters, "running")
    assert retried["outcome"] == "being done again"
    assert unscored["outcome"] == "batch 2 was trained without these samples"
    [_, retried] = shown(letters, "running", committed=4)
    assert retried["outcome"] == "done since: batch 3 is committed"


def test_letters_of_one_cause_are_one_reason_whoever_gave_up() -> None:
    found = shown(kept(about(1, 3), about(2, 2, kind="unscored"), about(3, 3, 1)), "paused")
    assert reasons(found) == [f"     3  newest 3: in scorer {CAUSE}"]


def test_a_letter_shows_its_message() -> None:
    slot = FragmentSlot(batch=3, group=0, first_sample=4, attempt=0)
    message = encode(FragmentFailed(slot=slot, stage="reward", reason=CAUSE, worker=None))
    [found] = shown(kept(about(1, 3).model_copy(update={"data": encoded(message)})), "paused")
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
        commands.newest_first(CheckedClient.at(last_address(tmp_path)))


def test_a_pause_at_a_failure_is_waited_for() -> None:
    class Runs:
        """Answers once for each step, and is paused then."""

        phases = iter([("running", True, 3), ("running", True, 3), ("paused", False, 4)])

        def get_run(self) -> RunView:
            phase, asked, step = next(self.phases)
            return RunView.model_construct(phase=phase, pause_at_failure=asked, step=step, steps=9)

    said: list[str] = []
    assert until_paused(Runs(), said.append).phase == "paused"
    assert said == ["step 3 of 9; waits until something fails"]
