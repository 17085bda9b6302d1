"""Pages that say what became of each sample, which version is the best, and who can be drained."""

import html
import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from digenrl.api.live import LiveRun
from digenrl.local.secrets.tokens import Tokens, load_tokens
from shared.run.log_entries import LetterKind, Work
from tests.api.past_run import past_run
from tests.follow.runs import Run
from tests.run_log import letter
from tests.view.sight import Scheduler
from tests.view.stored import stored_run
from tests.view.test_page import client_of


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return load_tokens(tmp_path)


def page_text(run: Run, tokens: Tokens, path: str, live: LiveRun | None = None) -> str:
    return html.unescape(operator_of(run, tokens, live).get(path).text)


def operator_of(run: Run, tokens: Tokens, live: LiveRun | None = None) -> TestClient:
    client = client_of(run, tokens, live)
    client.headers.update(tokens.headers("operator"))
    return client


def test_the_worst_samples_of_a_step_come_first_and_say_why(tmp_path: Path, tokens: Tokens) -> None:
    run = past_run(tmp_path / "objects")
    text = page_text(run, tokens, "/batches?step=1")
    rewards = re.findall(r"<b>([\d.]+|no score)</b>", text)
    assert rewards[:2] == ["0.000", "0.250"] and rewards[-1] == "no score"
    assert "1 sample has no score: group 1 (" in text and "order=unscored" in text
    assert "Samples of version 0, which step 1 trained on" in text
    alone = page_text(run, tokens, "/batches?step=1&order=unscored")
    assert re.findall(r"<b>([\d.]+|no score)</b>", alone) == ["no score"]
    assert "group 0, sample 3</a>" in text and "advantage -" in text
    assert "dead letter 1" in text
    pictures = re.findall(r'src="(/v1/batches/[^"]+)"', text)
    client = operator_of(run, tokens)
    assert client.get(pictures[0]).headers["content-type"] == "image/png"
    assert (
        re.findall(r"<b>([\d.]+)</b>", page_text(run, tokens, "/batches?order=best"))[0] == "1.000"
    )
    best, _, worst = page_text(run, tokens, "/").partition("Worst of step 1")
    assert "Best of step 1" in best and re.findall(r"<b>([\d.]+)</b>", best)[0] == "1.000"
    assert re.findall(r"<b>([\d.]+)</b>", worst)[0] == "0.000"
    assert client.get("/batches?step=2").status_code == 404
    assert client.get("/batches?order=loud").status_code == 422


def test_a_sample_says_why_it_is_as_it_is_beside_the_others_of_its_group(
    tmp_path: Path, tokens: Tokens
) -> None:
    run = past_run(tmp_path / "objects")
    links = re.findall(r'href="(/sample\?[^"]+)"', page_text(run, tokens, "/batches?step=1"))
    worst, *_, unscored = dict.fromkeys(links)
    text = page_text(run, tokens, worst)
    assert worst == "/sample?step=1&group=0&number=3"
    assert "<b>0.000</b> = 1 x proxy 0.000; its group has" in text and "on average" in text
    assert re.search(r"<dt>score of proxy</dt><dd>0; its group has 0\.\d+ on average", text)
    assert "such samples less likely" in text
    assert 'href="/batches" aria-current="true">training samples' in text
    assert "1 of 4 in its group" in text and text.count('href="/sample?') == 4
    failed = page_text(run, tokens, unscored)
    assert (
        "not trained: it could not be scored" in failed and "dead letter 1</a></dt><dd>" in failed
    )
    client = operator_of(run, tokens)
    for path in ("/sample?step=1&group=0&number=99", "/sample?step=9&group=0&number=0"):
        assert client.get(path).status_code == 404


def test_what_no_retry_would_change_is_over_and_says_what_has_become_of_it(
    tmp_path: Path, tokens: Tokens
) -> None:
    run = Run(tmp_path / "objects").begin()
    run.commit(2)  # batches 0 and 1, so that 2 is open
    kinds: list[tuple[LetterKind, int]] = [
        ("failed", 0),
        ("failed", 2),
        ("failed", 2),
        ("unscored", 1),
    ]
    letters = [
        letter(
            number, kind=kind, reason="no memory" if number < 3 else "no server",
            work=Work(batch=batch, group=number, first_sample=0),
        )
        for number, (kind, batch) in enumerate(kinds, 1)
    ]  # fmt: skip
    scheduler = Scheduler()
    scheduler.answers["/v1/run"] |= {"phase": "paused"}
    scheduler.keep(*letters, committed=2)
    text = page_text(run, tokens, "/letters?state=all", scheduler.live)
    posts = [posted.split() for posted in re.findall(r'data-post="([^"]+)"', text)]
    assert ["/v1/dead-letters/3/retry", "/v1/dead-letters/2/retry"] in posts
    assert ["/v1/dead-letters/3/drop", "/v1/dead-letters/2/drop"] in posts
    over = {f"/v1/dead-letters/{number}/drop" for number in (1, 4)}
    assert not [each for each in posts if over & {*each}]
    assert ["/v1/dead-letters/4/retry"] not in posts and ["/v1/dead-letters/2/retry"] in posts
    assert "batch 0 is committed" in text
    assert "batch 1 is committed" in text
    found = set(re.findall(r"<p><b>(\d)</b> open: no (\w+)", text))
    assert found == {("1", "memory"), ("1", "server")}


def test_before_the_first_step_there_are_no_samples(tmp_path: Path, tokens: Tokens) -> None:
    assert "No step is committed yet" in page_text(Run(tmp_path / "o").begin(), tokens, "/batches")


def test_the_best_version_is_named_with_the_figure_that_it_is_chosen_by(
    tmp_path: Path, tokens: Tokens
) -> None:
    run = stored_run(tmp_path, gold=0.1)
    text = page_text(run, tokens, "/versions")
    assert "Version <b>4</b> is the best by gold reward other (0.900)" in text
    assert '<th scope="col">evaluated: gold reward other</th>' in text
    assert ">0.900</a>" in text and ">0.500</a>" in text and ">0.650</a>" not in text
    assert "versions that are not evaluated do not count, and of equal ones the older" in text
    assert "digenrl export test --version best" in text
    assert '4</a> <span class="right">best</span>' in text
    equal = page_text(stored_run(tmp_path / "equal"), tokens, "/versions")
    assert '0 <span class="right">best so far: the model before training</span>' in equal
    assert "none is exported as the best. The best trained version is <b>4</b>" in equal
    assert text.count(">deleted<") == 5, "this store holds none"
    young = page_text(Run(tmp_path / "young").begin(), tokens, "/versions")
    assert "has the best" not in young
    rows = re.findall(r"/samples\?version=(\d+)", page_text(run, tokens, "/evaluations"))
    assert rows == ["4", "0"]


def test_a_host_is_drained_with_one_click_and_one_worker_is_given_work_again(
    tmp_path: Path, tokens: Tokens
) -> None:
    scheduler = Scheduler()
    [first] = scheduler.answers["/v1/workers"]
    others = [{"worker": "rollout-1", "drain": "drained"}, {"worker": "rollout-2"}]
    others.append({"worker": "reward-0", "service": "reward"})
    scheduler.answers["/v1/workers"] += [first | each for each in others]
    run = Run(tmp_path / "objects").begin()
    text = page_text(run, tokens, "/workers", scheduler.live)
    posts = [posted.split() for posted in re.findall(r'data-post="([^"]+)"', text)]
    assert "3 rollout (1 drained), 1 reward" in text
    drained = "<b>drained: has no work, and gets none</b>"
    assert re.findall(rf"<td>(generates|{drained})\s*</td>", text) == [
        "generates", drained, "generates", "generates",
    ]  # fmt: skip
    drains = [f"/v1/workers/rollout-{number}/drain" for number in (0, 2)]
    assert posts == [
        ["/v1/run/pause"],
        ["/v1/run/stop"],
        drains,
        ["/v1/workers/rollout-1/undrain"],
        drains[:1],
        ["/v1/workers/rollout-1/undrain"],
        drains[1:],
    ]
    for each in scheduler.answers["/v1/workers"]:
        each["drain"] = "drained"
    text = page_text(run, tokens, "/workers", Scheduler(scheduler.answers).live)
    assert "every rollout worker is drained" in text and "undrain this host" in text
    viewer = client_of(run, tokens, scheduler.live)
    assert "drain this host" not in viewer.get("/workers").text
    answered = operator_of(run, tokens, scheduler.live).post(drains[0], json={})
    assert answered.status_code == 202 and scheduler.asked == [drains[0]]
