"""`digenrl dlq` over a scheduler's API, and over the store of a run that is not in progress."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import httpx
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner, Result

from digenrl import dead_letters
from digenrl.cli import app
from digenrl.client import Client
from digenrl.local.address import address_of, write_address
from services.scheduler.shell.app import Scheduler
from shared.errors import UserError
from shared.run.dead_letters import DeadLetter, Work, add_letter, encoded
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


@pytest.mark.usefixtures("left")
def test_letters_of_a_run_that_is_over_are_read_in_its_store() -> None:
    listed = dlq("list", "test", "--limit", "2")
    assert listed.output.splitlines() == [
        "     5  open     failed       batch 0 group 5 sample 2: reward: no pixels",
        "     4  open     failed       batch 0 group 4 sample 2: reward: no pixels",
        "older ones: --before 4",
    ]
    assert "data: b'\\xc1bytes'" in dlq("show", "test", "3").output
    assert json.loads(dlq("show", "test", "3", "--json").output)["num_bytes"] == 6
    assert dlq("drop", "test", "5", "3").output.startswith("5: nobody needs it")
    assert [each["number"] for each in json.loads(dlq("list", "test", "--json").output)] == [
        4,
        2,
        1,
    ]
    retried = dlq("retry", "test", "4")
    assert (retried.exit_code, retried.output) == (
        1,
        "4: the run is not in progress; `digenrl up RECIPE --run test --resume` goes on with it, "
        "and does the work of its open batch again\n",
    )  # fmt: skip
    assert dlq("drop", "test", "--all").exit_code == 0
    assert dlq("list", "test").output == "no dead letters\n"
    assert len(json.loads(dlq("list", "test", "--all", "--json").output)) == 5


def test_letters_of_a_run_in_progress_are_asked_of_its_scheduler(
    scheduler: Scheduler, client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_letters(tmp_path, 5)

    async def read() -> None:
        keeping = asyncio.create_task(scheduler.dead_letters.keep())
        while not scheduler.dead_letters.letters:  # noqa: ASYNC110
            await asyncio.sleep(0)
        keeping.cancel()

    asyncio.run(read())

    @contextmanager
    def here(*_: object) -> Iterator[dead_letters.ApiDesk]:
        yield dead_letters.ApiDesk(Client(cast(httpx.Client, client)))

    monkeypatch.setattr(dead_letters, "desk_of", here)
    monkeypatch.setattr(dead_letters, "PAGE", 2)
    hint, *listed = dlq("list", "test").output.splitlines()
    assert len(listed) == 5 and hint.startswith("nothing is left to be done again")
    assert dlq("test").output.splitlines() == [hint, *listed], "the list is what a run's name asks"
    assert "outcome: " in dlq("show", "test", "1").output
    assert dlq("drop", "test", "2").output == "2: nobody needs it any more\n"
    assert dlq("drop", "test", "7").output == "7: there is no dead letter 7\n"
    said = dlq("retry", "test", "--all", "--json")
    notes = [each["note"] for each in json.loads(said.output)]
    assert (said.exit_code, set(notes)) == (1, {"batch 0 needs it no more; drop it"})
    assert len(notes) == 4


def test_a_list_says_which_letters_a_retry_may_help() -> None:
    def failed(number: int, batch: int) -> dict[str, object]:
        work = {"batch": batch, "group": 0, "first_sample": None, "attempt": 0}
        return {"number": number, "state": "open", "kind": "failed", "work": work}

    done, under_way = failed(1, 2), failed(2, 3)
    before_list, outcome = dead_letters.before_list, dead_letters.outcome_of_letter
    hint = before_list([under_way, done], 3, "demo")
    assert hint.startswith("a retry may help 1 of 2: `digenrl dlq retry demo 2`; ")
    assert before_list([done], 3, "demo").startswith("nothing is left to be done again")
    retried = under_way | {"state": "retried"}
    assert before_list([done], None, "demo") == "" == before_list([retried], 3, "demo")
    assert [outcome(each, 3) for each in (done, under_way, retried)] == [
        "done since: batch 2 is committed", "", "being done again",
    ]  # fmt: skip
    assert outcome(retried, 4) == "done since: batch 3 is committed"
    assert outcome(retried | {"kind": "unscored"}, 4) == "its samples count without a score"


def test_a_command_without_numbers_says_what_it_needs() -> None:
    assert "NUMBERS: name letters" in str(dlq("drop", "test").exception)


def test_the_address_of_a_run_is_in_its_folder(tmp_path: Path) -> None:
    assert address_of(tmp_path) == ""
    write_address(tmp_path, "http://127.0.0.1:1")
    assert address_of(tmp_path) == "http://127.0.0.1:1"
    with pytest.raises(UserError, match="does not answer"):
        dead_letters.ApiDesk(Client.at(address_of(tmp_path))).letters("open", 1, None)
