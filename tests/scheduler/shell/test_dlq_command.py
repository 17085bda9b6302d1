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

from digenrl import dead_letters, letter_book
from digenrl.cli import app
from digenrl.client import Client
from digenrl.local import reading
from digenrl.local.address import address_of, write_address
from digenrl.steering import until_known, until_paused
from services.scheduler.shell.api_models import RunView
from services.scheduler.shell.app import Scheduler
from shared.errors import UserError
from shared.messages.codec import encode
from shared.messages.contracts import FragmentFailed, FragmentSlot
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
        "     5  open     attempt failed  step 1 (batch 0), group 5, from sample 2 on: no pixels",
        "     4  open     attempt failed  step 1 (batch 0), group 4, from sample 2 on: no pixels",
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
        "4: the run is over; `digenrl up RECIPE --resume` resumes it\n",
    )  # fmt: skip
    assert dlq("drop", "test", "--all").exit_code == 0
    assert dlq("list", "test").output == "no dead letters\n"
    assert len(json.loads(dlq("list", "test", "--all", "--json").output)) == 5


@pytest.mark.usefixtures("left")
def test_the_name_of_a_run_takes_the_options_of_the_list() -> None:
    listed = dlq("test", "--limit", "2").output
    assert listed == dlq("list", "test", "--limit", "2").output and listed.startswith("     5")
    assert json.loads(dlq("test", "--json").output)[0]["number"] == 5


def test_a_word_that_is_no_run_is_answered_with_the_commands(tmp_path: Path) -> None:
    for words in (("discard", "--help"), ("discard",), ("discard", "test")):
        said = str(dlq(*words).exception)
        assert said.startswith("discard: there is no such run, and no such command; commands are ")
        assert "drop, list, retry, show" in said
    (tmp_path / "discard").mkdir()
    (tmp_path / "discard" / "recipe.json").touch()
    assert "one by one" in dlq("discard", "--runs", str(tmp_path), "--help").output


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
    def here(*_: object, **__: object) -> Iterator[reading.Reading]:
        yield reading.Reading(Client(cast(httpx.Client, client)), is_live=True)

    monkeypatch.setattr(reading, "reading", here)
    monkeypatch.setattr(dead_letters, "PAGE", 2)
    hint, *listed = dlq("list", "test", "--limit", "9", "--all").output.splitlines()
    assert len(listed) == 5 and hint.startswith("none is open, so nothing can be done again; 5 ")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/test").mkdir(parents=True)
    (tmp_path / "runs/test/recipe.json").touch()
    assert dlq("test").output.splitlines()[:2] == [hint, "     5  newest 5: no pixels"]
    assert "outcome: " in dlq("show", "test", "1").output
    assert dlq("drop", "test", "2").output == "2: nobody needs it any more\n"
    assert dlq("drop", "test", "7").output == "7: there is no dead letter 7\n"
    assert dlq("retry", "test", "--all").output == "no dead letters\n"
    said = dlq("retry", "test", "1")
    assert (said.exit_code, said.output) == (1, "1: nothing is left to do: batch 0 is over\n")


NONE = "none is open, so nothing can be done again"
CAUSE = "mine: ValueError: no template (slow_reward.py, line 7)"


def about(
    number: int, batch: int, attempt: int = 0, kind: str = "failed", state: str = "open"
) -> dict[str, object]:
    work = {"batch": batch, "group": 0, "first_sample": 4, "attempt": attempt}
    reason = CAUSE if kind == "unscored" else f"reward: {CAUSE}"
    return {
        "number": number, "state": state, "kind": kind, "work": work, "reason": reason,
        "subject": "s", "found": 0.0, "data": "", "is_given": False,
    }  # fmt: skip


def book_of(
    *letters: dict[str, object], committed: int | None = 3, phase: str = "running"
) -> letter_book.Book:
    now = None if committed is None else dead_letters.Now(committed, phase)
    return letter_book.Book.of("demo", letters[::-1], now)


def test_a_list_says_which_letters_a_retry_may_help_and_what_to_mend_first() -> None:
    done, under_way = about(1, 2, state="over"), about(2, 3)
    first, pause, mending, retry, counts, mend = book_of(done, under_way).hints()
    assert first == "to have what fails done after all:" and mending == "  2. mend it"
    assert pause.startswith("  1. `digenrl pause demo --at-failure` waits until something fails")
    assert retry == "  3. `digenrl dlq retry demo --all --resume`"
    assert counts.startswith("1 is open; 1 is over: done or trained without")
    assert mend.startswith("mend first what makes slow_reward.py line 7 fail. ")
    assert book_of(done).hints() == [counts.replace("1 is open", NONE)], "it fails no more"
    now = done | {"found": time.time()}
    assert len(book_of(now).hints()) == 5
    resume = "once it is mended: `digenrl dlq retry demo --all --resume`"
    assert book_of(done, under_way, phase="paused").hints() == [mend, resume, counts]
    assert book_of(under_way, phase="failed").hints()[0] == resume.replace(" --resume", "")
    again, none = book_of(done, phase="paused").hints()
    assert none.startswith(NONE) and again.endswith(
        "`digenrl pause demo --at-failure`, then `digenrl resume demo`"
    )
    refused = under_way | {"work": None, "kind": "refused"}
    assert book_of(refused).hints()[0].endswith("`digenrl dlq drop demo --all`")
    retried = about(2, 3, state="retried")
    assert book_of(done, committed=None).hints() == [] == book_of(retried).hints()
    assert [book_of(each).outcome(each) for each in (done, under_way, retried)] == [
        "done since: batch 2 is committed", "", "being done again",
    ]  # fmt: skip
    assert book_of(retried, committed=4).outcome(retried) == "done since: batch 3 is committed"


def test_work_that_failed_again_names_the_later_letters_and_is_not_called_done() -> None:
    first, second = about(82, 2, state="retried"), about(83, 2, 1)
    last = about(84, 2, 2, kind="unscored")
    book = book_of(first, second, last)
    unscored = "batch 2 was trained without these samples"
    assert book.outcome(first) == f"failed again: letters 83, 84; {unscored}"
    assert book.outcome(second) == f"failed again: letter 84; {unscored}"
    assert book.outcome(last) == unscored
    scored = book_of(first, second)
    assert scored.outcome(first) == "failed again: letter 83; done since: batch 2 is committed"


def test_the_newest_letter_of_a_piece_of_work_decides_for_all_of_it() -> None:
    older, newest, other = about(1, 3), about(2, 3, 1, kind="unscored"), about(3, 4)
    book = book_of(older, newest, other)
    assert book.helped(book.letters) == [2], "what failed is tried again by itself"
    paused = book_of(older, newest, other, phase="paused")
    assert paused.helped(paused.letters) == [3, 2]
    given = book_of(older, newest | {"is_given": True}, other)
    assert given.helped(given.letters) == []
    lines = book.lines(book.letters)
    assert lines[1].endswith("line 7)") and lines[2].endswith("[see letter 2]")
    tried = book_of(about(1, 3), about(2, 3, 1), phase="paused")
    assert tried.helped([about(1, 3), about(2, 3, 1)]) == [2]


def test_letters_of_one_cause_are_one_reason_whoever_gave_up() -> None:
    book = book_of(about(1, 3), about(2, 2, kind="unscored"), about(3, 3, 1))
    assert book.reasons(book.letters) == [f"     3  newest 3: {CAUSE}"]
    assert [each["number"] for each in book.chosen("open", reason="VALUEerror")] == [3, 2, 1]
    assert book.chosen("open", reason="no pixels") == []


def test_a_letter_shows_the_fields_of_its_message_and_each_sentence_once() -> None:
    slot = FragmentSlot(batch=3, group=0, first_sample=4, attempt=0)
    message = encode(FragmentFailed(slot=slot, stage="reward", reason=CAUSE, worker=None))
    lines = letter_book.shown_lines(about(1, 3) | {"data": encoded(message)})
    assert "work: step 4 (batch 3), group 0, from sample 4 on, attempt 1" in lines
    assert "kind: attempt failed" in lines and not any(each.startswith("subject") for each in lines)
    assert lines[-2:] == ["message kind: fragment_failed", "message stage: reward"]
    assert "".join(lines).count(CAUSE) == 1
    reasons = {"scorer": "mine", "samples": {"4": CAUSE, "5": CAUSE, "6": "it hangs"}}
    lines = letter_book.shown_lines(
        about(1, 3, kind="unscored") | {"data": encoded(json.dumps(reasons).encode())}
    )
    assert lines[-2:] == [
        "message samples 4, 5: see its reason",
        "message samples 6: it hangs",
    ]


def test_a_retry_is_of_the_newest_letter_about_the_work(
    scheduler: Scheduler, client: TestClient
) -> None:
    desk = dead_letters.Desk(Client(cast(httpx.Client, client)))
    retried, again = about(82, 3, state="retried"), about(83, 3, 1)
    both = book_of(retried, again | {"state": "retried"})
    assert both.settle(desk, 82, "retry") == "letter 83 was retried before"
    assert book_of(retried).settle(desk, 82, "retry") == "letter 82 was retried before"


def test_a_command_without_numbers_says_what_it_needs() -> None:
    assert "NUMBERS: name letters" in str(dlq("drop", "test").exception)


def test_the_address_of_a_run_is_in_its_folder(tmp_path: Path) -> None:
    assert address_of(tmp_path) == ""
    write_address(tmp_path, "http://127.0.0.1:1")
    assert address_of(tmp_path) == "http://127.0.0.1:1"
    with pytest.raises(UserError, match="does not answer"):
        dead_letters.Desk(Client.at(address_of(tmp_path))).every()


def test_what_was_retried_is_known_when_its_batch_is_committed_or_it_failed_again() -> None:
    retried = about(4, 3, state="retried")
    assert not book_of(retried).is_known(retried)
    assert book_of(retried, committed=4).is_known(retried)
    again = book_of(retried, about(5, 3, 1))
    assert again.is_known(retried) and again.newest(4) == 5

    class Waiting(dead_letters.Desk):
        """Has a run whose batch is committed while somebody waits."""

        def every(self, first: int = 1) -> list[dict[str, object]]:
            return [retried]

        def now(self) -> dead_letters.Now:
            return dead_letters.Now(3 + len(said))

    said: list[str] = []
    outcome = until_known(Waiting(cast(Client, None)), "demo", [4], said.append)
    assert said == ["step 3; waits for the commit of batch 3"]
    assert outcome[0].endswith("[done since: batch 3 is committed]")


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
