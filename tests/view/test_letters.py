"""The page of dead letters."""

import asyncio
import html
import re
from pathlib import Path

from digenrl.local.tokens import tokens_of
from digenrl.view.figures import letters_of
from shared.run.dead_letters import DeadLetter, Kind, Letters, Work, add_letter
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
    kept: list[tuple[DeadLetter, Letters]] = [
        (about(1, 2, 0), "retried"), (about(2, 2, 1), "open"), (about(3, 2, 2, "unscored"), "open"),
    ]  # fmt: skip
    found = letters_of(kept, 3, None)
    last, second, first = found["letters"]
    unscored = "batch 2 is committed; its samples count without a score"
    assert last[2:] == ("its samples count as unscored already", unscored)
    assert second[2] == "see letter 3"
    assert first[3] == f"failed again: letters 2, 3; {unscored}"
    assert [number for _, number in found["reasons"]] == [2]
    assert {letter.reason for letter, *_ in found["letters"]} == {found["reasons"][0][0]}
    assert found["mend"] == []


def test_the_page_says_what_to_mend_where_a_retry_may_help() -> None:
    found = letters_of([(about(1, 2, 0), "open"), (about(2, 2, 1), "open")], 2, None)
    assert [letter[2] for letter in found["letters"]] == [None, "see letter 2"]
    [mend] = found["mend"]
    assert mend.startswith("mend first what makes slow_reward.py line 7 fail: else it fails again.")


def test_only_the_newest_letter_of_a_piece_of_work_has_a_button_for_a_retry(tmp_path: Path) -> None:
    run, tokens = Run(tmp_path / "objects").begin(), tokens_of(tmp_path)
    for letter in (about(1, 0, 0), about(2, 0, 1)):
        asyncio.run(add_letter(run.store, RUN, letter))
    client = client_of(run, tokens, Scheduler().live)
    client.headers.update(tokens.headers("operator"))
    text = html.unescape(client.get("/letters").text)
    assert re.findall(r'data-post="/letters/(\d)/retry"', text) == ["2"]
    assert "see letter 2" in text and "nothing: see letter" not in text
    assert "Before a retry: mend first what makes slow_reward.py line 7 fail" in text
