"""The page of dead letters."""

import asyncio
import html
import re
from pathlib import Path

from digenrl.local.tokens import tokens_of
from digenrl.view.figures import letters_of
from shared.run.dead_letters import DeadLetter, Kind, Stored, Work, add_letter
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


def test_letters_about_the_same_work_agree_and_have_one_reason() -> None:
    kept: list[tuple[DeadLetter, Stored]] = [
        (about(1, 2, 0), "retried"), (about(2, 2, 1), "open"), (about(3, 2, 2, "unscored"), "open"),
    ]  # fmt: skip
    assert letters_of(kept, 3, None)["letters"] == [], "a later letter tells of the work"
    [retried] = letters_of([(about(1, 2, 0), "retried")], 3, None)["letters"]
    assert retried[3] == "done since: batch 2 is committed"
    found = letters_of(kept, 3, None, every=True)
    assert found["states"] == {"over": 2, "retried": 1}
    last, second, first = found["letters"]
    unscored = "batch 2 was trained without these samples"
    assert last[2:] == ("batch 2 is committed", unscored)
    assert second[2] == "see letter 3"
    assert first[3] == f"failed again: letters 2, 3; {unscored}"
    assert [number for _, number in found["reasons"]] == [2]
    assert {letter.reason for letter, *_ in found["letters"]} == {found["reasons"][0][0]}
    assert found["mend"] == []


def test_the_page_says_what_to_mend_where_a_retry_may_help() -> None:
    kept: list[tuple[DeadLetter, Stored]] = [(about(1, 2, 0), "open"), (about(2, 2, 1), "open")]
    going = letters_of(kept, 2, None, every=True, is_running=True)
    assert [letter[2] for letter in going["letters"]] == [
        "it is tried again by itself",
        "see letter 2",
    ]
    assert going["useful"] == []
    found = letters_of(kept, 2, None, every=True)
    assert [letter[2] for letter in found["letters"]] == [None, "see letter 2"]
    assert found["useful"] == [2] and found["states"] == {"open": 1, "over": 1}
    given = {2: {"state": "over", "is_given": True}}
    assert letters_of(kept, 2, None, given)["useful"] == []
    assert letters_of(kept, 2, None, given)["states"] == {"over": 2}
    [mend] = found["mend"]
    assert mend.startswith("mend first what makes slow_reward.py line 7 fail. ")


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
