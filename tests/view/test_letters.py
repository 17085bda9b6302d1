"""The page of dead letters."""

import asyncio
import html
import re
from pathlib import Path

from digenrl.dead_letters import Now
from digenrl.letter_book import Book
from digenrl.local.secrets.tokens import tokens_of
from digenrl.view.figures import letters_of
from services.scheduler.shell.api_letters import letter_view
from shared.run.dead_letters import DeadLetter, Kind, Work, add_letter
from tests.follow.runs import RUN, Run
from tests.view.sight import Scheduler
from tests.view.test_page import client_of

CAUSE = "mine: ValueError: no template (slow_reward.py, line 7)"


def about(number: int, batch: int, attempt: int, kind: Kind = "failed") -> DeadLetter:
    return DeadLetter(
        number=number, digest=f"{number:064x}", kind=kind, stream="DG_EVT", subject="s", found=1.0,
        reason=CAUSE if kind == "unscored" else f"reward: {CAUSE}", data="",
        work=Work(batch=batch, group=1, first_sample=0, attempt=attempt),
    )  # fmt: skip


def test_letters_that_matter_now_are_shown_and_those_of_one_cause_have_one_reason() -> None:
    kinds: tuple[Kind, ...] = ("failed", "failed", "unscored")
    letters = [
        letter_view(about(number, 2, number, kind), "open").model_dump()
        for number, kind in enumerate(kinds)
    ]
    found = letters_of(Book.of("run", letters[::-1], Now(2, "paused")), None)
    [(newest, *_)] = found["letters"]
    assert newest["number"] == 2, "which tells of the work of the others as well"
    assert found["reasons"] == [(newest["reason"], 3)] and found["useful"] == [2]
    every = letters_of(Book.of("run", letters[::-1], Now(3, "running")), 2, every=True)
    assert [each[0]["number"] for each in every["letters"]] == [1, 0]
    assert every["mend"] == [] == every["useful"]


def test_only_the_newest_letter_of_a_piece_of_work_has_a_button_for_a_retry(tmp_path: Path) -> None:
    run, tokens = Run(tmp_path / "objects").begin(), tokens_of(tmp_path)
    for letter in (about(1, 0, 0), about(2, 0, 1)):
        asyncio.run(add_letter(run.store, RUN, letter))
    scheduler = Scheduler()
    scheduler.answers["/v1/run"] |= {"phase": "failed"}
    client = client_of(run, tokens, scheduler.live)
    client.headers.update(tokens.headers("operator"))
    assert "see letter 2" not in client.get("/letters").text
    text = html.unescape(client.get("/letters?state=all").text)
    assert re.findall(r'data-post="/letters/(\d)/retry"', text) == ["2"]
    assert "see letter 2" in text and "nothing: see letter" not in text
    assert "Mend first what makes slow_reward.py line 7 fail" in text


def buttons(tmp_path: Path, **now: object) -> list[str]:
    """Return what buttons of the page post, of a run with one open letter and one that is over."""
    run, tokens = Run(tmp_path / "objects").begin(), tokens_of(tmp_path)
    for letter in (about(1, 0, 0), about(2, 0, 1)):
        asyncio.run(add_letter(run.store, RUN, letter))
    scheduler = Scheduler()
    scheduler.answers["/v1/run"] |= now
    client = client_of(run, tokens, scheduler.live)
    client.headers.update(tokens.headers("operator"))
    return re.findall(r'data-post="([^"]*)"', client.get("/letters").text)


def test_the_page_has_the_buttons_that_fit_what_the_run_does(tmp_path: Path) -> None:
    letters = ["/letters/2/retry", "/letters/2/drop"]
    header = ["/steer/pause", "/steer/stop"]
    running = buttons(tmp_path / "a")
    assert running == [*header, "/steer/pause-at-failure", letters[1]]
    asked = buttons(tmp_path / "b", pause_at_failure=True)
    assert asked == ["/steer/pause", "/steer/resume", "/steer/stop", letters[1]]
    paused = buttons(tmp_path / "c", phase="paused")
    assert paused == ["/steer/stop", "/steer/resume", "/letters/2/retry /steer/resume", *letters]
