"""The page of dead letters."""

import html
import re
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from digenrl.local.secrets.tokens import load_tokens
from shared.run.log_entries import DeadLetter, LetterKind, Work
from tests.follow.runs import Run
from tests.run_log import letter
from tests.view.sight import Scheduler
from tests.view.test_page import client_of

CAUSE = "reward: mine: ValueError: no template (slow_reward.py, line 7)"


def about(number: int, batch: int, attempt: int, kind: LetterKind = "failed") -> DeadLetter:
    work = Work(batch=batch, group=1, first_sample=0, attempt=attempt)
    return letter(number, kind=kind, reason=CAUSE, work=work)


def test_open_letters_are_shown_and_those_of_one_cause_have_one_reason(tmp_path: Path) -> None:
    kinds: tuple[LetterKind, ...] = ("failed", "failed", "unscored")
    letters = [about(number, number, 0, kind) for number, kind in enumerate(kinds, 1)]
    client = client_with(tmp_path, *letters, about(4, 2, 1), committed=2, phase="paused")
    text = html.unescape(client.get("/letters").text)
    assert re.findall(r'id="letter-(\d)"', text) == ["4", "3"]
    assert f"<p><b>2</b> open: {CAUSE}</p>" in text
    every = client.get("/letters?state=all").text
    assert re.findall(r'id="letter-(\d)"', every) == ["4", "3", "2", "1"]
    assert re.findall(r'<span class="quiet">(.*)</span>', every)[-4:] == [
        "", "", "see letter 4", "batch 1 is committed",
    ]  # fmt: skip


def client_with(tmp_path: Path, *letters: DeadLetter, committed: int = 0, **now: Any) -> TestClient:
    """Return an operator's client of the page of a run that has these letters."""
    scheduler, tokens = Scheduler(), load_tokens(tmp_path)
    scheduler.answers["/v1/run"] |= now
    scheduler.keep(*letters, committed=committed)
    client = client_of(Run(tmp_path / "objects").begin(), tokens, scheduler.live)
    client.headers.update(tokens.headers("operator"))
    return client


def test_only_the_newest_letter_of_a_piece_of_work_has_a_button_for_a_retry(tmp_path: Path) -> None:
    client = client_with(tmp_path, about(1, 0, 0), about(2, 0, 1), phase="failed")
    assert "see letter 2" not in client.get("/letters").text
    text = html.unescape(client.get("/letters?state=all").text)
    assert re.findall(r'data-post="/v1/dead-letters/(\d)/retry"', text) == ["2"]
    assert "see letter 2" in text


def test_the_page_has_the_buttons_that_fit_what_the_run_does(tmp_path: Path) -> None:
    """The run has one open letter and one that is over."""

    def buttons(folder: str, **now: Any) -> list[str]:
        client = client_with(tmp_path / folder, about(1, 0, 0), about(2, 0, 1), **now)
        return re.findall(r'data-post="([^"]*)"', client.get("/letters").text)

    retry, drop = "/v1/dead-letters/2/retry", "/v1/dead-letters/2/drop"
    pause, stop, resume = (f"/v1/run/{each}" for each in ("pause", "stop", "resume"))
    assert buttons("a") == [pause, stop, "/v1/run/pause-at-failure", drop]
    assert buttons("b", pause_at_failure=True) == [pause, resume, stop, drop]
    assert buttons("c", phase="paused") == [stop, resume, f"{retry} {resume}", retry, drop]
