"""A vision-language judge behind a real server: what it is asked, and which answers are numbers."""

import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import structlog

from services.reward.app import RewardApp
from services.reward.scorer import WeightedScorer, build_scorers, scorer_kind
from services.reward.scorers.judge import data_url, number_in, request
from shared.errors import ScorerUnavailable, ScoringError, UserError
from shared.recipe.recipe import load_recipe
from shared.recipe.rewards import Judge, ScorerTable
from shared.telemetry import configure_logs
from tests import examples
from tests.paths import DIGITS
from tests.reward.endpoint import Asked, Reply, completion, endpoint
from tests.reward.on_bus import context_alone

KEY = "sk-a-key-of-the-tests"
VARIABLE = "A_KEY_OF_THE_TESTS"
LEVELS = [0, 51, 102, 153, 204, 255]


def judge(url: str, patience: float = 10, **keys: Any) -> WeightedScorer:
    table = Judge.model_validate({"model": "a-model", **keys})
    [built] = build_scorers(
        [ScorerTable(name="j", type="judge", url=url, patience=patience, judge=table)]
    )
    return built


def even_images(*levels: int) -> Any:
    """Return images of one gray level each."""
    return np.stack([np.full((3, 4, 6), level, np.uint8) for level in levels])


def prompts(num: int) -> list[dict[str, object]]:
    return [{"prompt": f"prompt {index}"} for index in range(num)]


def brightness(asked: Asked) -> Reply:
    """What it sees, out of 10."""
    return completion(f"{asked.image.mean() / 25.5:.2f}")


def test_the_judge_sees_the_pixels_and_the_prompt_and_its_number_is_the_score() -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (3, 5, 7), dtype=np.uint8)
    with endpoint(lambda _: completion("7.5")) as server:
        scores = judge(server.url + "/").score(image[None], [{"prompt": "a {highest} cat"}])
    [asked] = server.asked
    assert scores == [0.75]
    assert np.array_equal(asked.image, image.transpose(1, 2, 0))
    assert asked.path == "/v1/chat/completions" and asked.authorization is None
    assert "a {highest} cat" in asked.question and "from 0 (it fails" in asked.question
    assert "to 10 (" in asked.question
    assert (asked.body["model"], asked.body["temperature"]) == ("a-model", 0)


def test_the_question_the_scale_and_the_options_are_the_recipe_s() -> None:
    options = {"max_tokens": 5, "seed": 3}
    keys: dict[str, Any] = {"prompt": "{prompt}? 0..{highest}", "highest": 5, "options": options}
    with endpoint(lambda _: completion("Because.\nScore: 4")) as server:
        assert judge(server.url, **keys).score(even_images(7), prompts(1)) == [0.8]
    [asked] = server.asked
    assert asked.question == "prompt 0? 0..5"
    assert {key: asked.body[key] for key in options} == options
    assert "temperature" not in asked.body


def test_several_are_asked_at_a_time_and_each_has_its_own_score() -> None:
    together = threading.Barrier(3, timeout=20)

    def reply(asked: Asked) -> Reply:
        together.wait()  # nobody is answered before three have asked
        time.sleep(0.05 * (1 - asked.image.mean() / 255))  # the first ones last
        return brightness(asked)

    with endpoint(reply) as server:
        scores = judge(server.url, at_once=3).score(even_images(*LEVELS), prompts(6))
    assert scores == pytest.approx([level / 255 for level in LEVELS])
    assert [f"prompt {index}" in asked.question for index, asked in enumerate(
        sorted(server.asked, key=lambda asked: float(asked.image.mean()))
    )] == [True] * 6  # fmt: skip


def test_no_more_are_asked_at_a_time_than_the_recipe_says() -> None:
    lock, now, most = threading.Lock(), 0, 0

    def reply(asked: Asked) -> Reply:
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
        time.sleep(0.02)
        with lock:
            now -= 1
        return brightness(asked)

    with endpoint(reply) as server:
        judge(server.url, at_once=2).score(even_images(*LEVELS), prompts(6))
    assert most == 2


def test_a_video_scores_the_mean_of_its_frames() -> None:
    with endpoint(brightness) as server:
        videos = even_images(0, 51, 102, 255).reshape(2, 2, 3, 4, 6)
        assert judge(server.url).score(videos, prompts(2)) == pytest.approx([0.1, 0.7])


@pytest.mark.parametrize(
    "fault", [Reply("busy", 503), Reply("slow down", 429), Reply("no gateway", 502), None]
)
def test_a_server_that_recovers_is_asked_again(fault: Reply | None) -> None:
    faults = [fault] * 3

    def reply(asked: Asked) -> Reply | None:
        return faults.pop() if faults else brightness(asked)

    with endpoint(reply) as server:
        assert judge(server.url, at_once=1).score(even_images(102), prompts(1)) == [0.4]
    assert len(server.asked) == 4


def test_an_answer_of_any_length_is_refused_while_it_comes() -> None:
    """400 MiB took 787 MiB of memory; packed, 600 MiB came as 600 kB."""
    long = completion("7")
    with (
        endpoint(lambda asked: replace(long, body=" " * (5 << 20) + str(long.body))) as server,
        pytest.raises(ScoringError, match="answers more than 4 MiB"),
    ):
        judge(server.url).score(even_images(102), prompts(1))
    assert server.encodings == ["identity"]


def test_an_answer_that_drips_ends_with_the_patience() -> None:
    def drip(asked: Asked) -> Reply:  # the whole answer takes 25 s
        return Reply(str(completion("7").body), pause_s=0.2)

    with endpoint(drip) as server, pytest.raises(ScorerUnavailable, match="complete in time"):
        judge(server.url, patience=1.0).score(even_images(102), prompts(1))


def test_a_server_that_stays_unwell_fails_the_scoring() -> None:
    with (
        endpoint(lambda _: Reply("out of order", 500)) as server,
        pytest.raises(ScoringError, match=r"no score in 0 s \(500: out of order\)"),
    ):
        judge(server.url, patience=0.3).score(even_images(1), prompts(1))
    assert len(server.asked) >= 2


def test_what_is_refused_is_not_asked_again() -> None:
    with (
        endpoint(lambda _: Reply("no such model", 404)) as server,
        pytest.raises(ScoringError, match="refuses: 404: no such model"),
    ):
        judge(server.url, at_once=1).score(even_images(1, 2, 3), prompts(3))
    assert len(server.asked) <= 2  # one may have begun when the first was refused


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(""), "no completion: the body: "),
        (Reply("{"), "no completion: the body: "),
        (Reply(b"\xff\xfe"), "no completion: the body: "),
        (Reply("[]"), "no completion: "),
        (Reply("{}"), "no completion: choices: "),
        (Reply('{"choices": []}'), "no completion: choices: "),
        (Reply('{"choices": [{"message": {}}]}'), "choices.0.message.content: "),
        (completion(None), "choices.0.message.content: "),
        (completion("1", finish_reason="length"), "cut off; raise max_tokens in judge.options"),
        (completion("I cannot say."), "does not end in a number from 0 to 10: 'I cannot say.'"),
    ],
)
def test_what_is_no_answer_fails_the_scoring(reply: Reply, said: str) -> None:
    with endpoint(lambda _: reply) as server, pytest.raises(ScoringError) as raised:
        judge(server.url).score(even_images(1), prompts(1))
    assert said in str(raised.value) and server.url in str(raised.value)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("8", 8), (" 8.25\n", 8.25), ("score: 0", 0), ("Good.\n\nScore: 10", 10), ("10.0", 10),
        ("cat (object): 1\nFinal Score: 3.5", 3.5),
    ],
)  # fmt: skip
def test_a_number_alone_in_the_last_line_is_the_judge_s(answer: str, number: float) -> None:
    assert number_in(answer, 10) == number


@pytest.mark.parametrize(
    "answer",
    [
        "", " ", "eight", "8/10", "8 of 10", "8 or 9", "8,5", "-1", "10.1", "1e1", "nan", "inf",
        "8.", ".5", "0x8", "８", "**8**", "8\nI am sure.", "Rating: 8", "99999999999999999999",
    ],
)  # fmt: skip
def test_anything_else_is_no_number(answer: str) -> None:
    with pytest.raises(ValueError, match="does not end in a number from 0 to 10"):
        number_in(answer, 10)


@pytest.fixture(params=["variable", "file"])
def with_key(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    if request.param == "variable":
        monkeypatch.setenv(VARIABLE, KEY)
        return {"key_env": VARIABLE}
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    return {"key_file": str(path)}


@pytest.fixture
def own_logs() -> Iterator[None]:
    """The test may say where logs go."""
    yield
    structlog.reset_defaults()


def test_the_key_is_sent(with_key: dict[str, Any]) -> None:
    with endpoint(brightness) as server:
        judge(server.url, **with_key).score(even_images(1, 2), prompts(2))
    assert [asked.authorization for asked in server.asked] == [f"Bearer {KEY}"] * 2


@pytest.mark.parametrize(
    "reply",
    [
        lambda asked: Reply(f"{asked.authorization} is no key", 401),
        lambda asked: Reply(f"not now, {asked.authorization}", 503),
        lambda asked: completion(f"you are {asked.authorization}"),
        lambda asked: Reply(f'{{"{asked.authorization}": 1}}'),
        lambda _: None,
    ],
)
def test_the_key_is_in_no_log_and_no_error(
    reply: Any,
    with_key: dict[str, Any],
    own_logs: None,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    configure_logs(service="reward", worker="w", run="r")
    caplog.set_level("DEBUG")
    with endpoint(reply) as server:
        scorer = judge(server.url, patience=0.2, **with_key)
        app = RewardApp([scorer], context_alone())
        media = safetensors.numpy.save({"images": even_images(1, 2)})
        with pytest.raises(ScoringError) as raised:
            app._outcomes(media, examples.generated(examples.task()))
    assert all(asked.authorization == f"Bearer {KEY}" for asked in server.asked)
    told = capfd.readouterr()
    logged = told.out + told.err + caplog.text
    assert "scorer_failed" in logged or "scorer_unavailable" in logged
    written = "".join(traceback.format_exception(raised.value))
    for text in (logged, written, repr(scorer), repr(raised.value)):
        assert KEY not in text


def test_a_key_that_is_not_there_is_found_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(**keys: str) -> str:
        table = Judge.model_validate({"model": "m", **keys})
        with pytest.raises(UserError) as raised:
            scorer_kind(ScorerTable(name="j", type="judge", url="http://h/v1", judge=table))
        return str(raised.value)

    monkeypatch.delenv(VARIABLE, raising=False)
    assert said(key_env=VARIABLE).startswith(
        f"reward.scorers.j.judge.key_env: {VARIABLE} is not set here"
    )
    missing = tmp_path / "nowhere"
    assert said(key_file=str(missing)) == (
        f"reward.scorers.j.judge.key_file: cannot read {missing}: No such file or directory"
    )
    for bad in ("", " \n", f"{KEY}\n{KEY}", "schlüssel"):
        monkeypatch.setenv(VARIABLE, bad)
        text = said(key_env=VARIABLE)
        assert "judge.key_env: this is no key" in text and KEY not in text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"url": "host:8000"}, r"reward\.scorers\.j\.url: judge needs the address"),
        ({"judge": None}, r"reward\.scorers\.j\.judge: missing; name the model"),
    ],
)
def test_a_judge_needs_an_address_and_a_model(keys: dict[str, Any], said: str) -> None:
    whole = {"url": "http://h/v1", "judge": Judge(model="m"), **keys}
    with pytest.raises(UserError, match=said):
        scorer_kind(ScorerTable(name="j", type="judge", **whole))


def with_judge(tmp_path: Path, table: str) -> Path:
    """A recipe whose only scorer is a judge."""
    (tmp_path / "digits.toml").write_text(DIGITS.read_text())
    scorer = '[[reward.scorers]]\nname = "j"\ntype = "judge"\nurl = "http://h/v1"\n'
    path = tmp_path / "recipe.toml"
    path.write_text(f'base = "digits.toml"\n{scorer}judge = {{ {table} }}\n')
    return path


def test_a_recipe_names_the_judge_and_where_its_key_is(tmp_path: Path) -> None:
    recipe = load_recipe(with_judge(tmp_path, 'model = "m", key_file = "secret/key", at_once = 2'))
    [scorer] = recipe.reward.scorers
    assert scorer.judge is not None
    assert scorer.judge.key_file == tmp_path / "secret" / "key"
    assert (scorer.judge.model, scorer.judge.at_once, scorer.judge.highest) == ("m", 2, 10)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('modle = "m"', "judge.modle: unknown key; did you mean model?"),
        ("highest = 5", "judge.model: missing"),
        ('model = "m", highest = 0', "judge.highest: input should be greater than 0"),
        ('model = "m", at_once = 1000', "judge.at_once: "),
        ('model = "m", key_env = "A", key_file = "b"', "judge.key_file: give key_env or key_file"),
        ('model = "m", options = { stream = true }', "judge.options: stream cannot be set here"),
    ],
)
def test_a_faulty_table_of_the_judge_names_its_key(tmp_path: Path, table: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        load_recipe(with_judge(tmp_path, table))
    assert f"reward.scorers.j.{said}" in str(raised.value) and "\n" not in str(raised.value)


def test_a_request_shows_frames_of_a_video_evenly_spread() -> None:
    table = Judge(model="m", rubric="video-motion", frames=3)
    video = np.stack([np.full((3, 4, 4), 10 * number, np.uint8) for number in range(9)])
    asked: Any = request(table, video, "a dog runs")
    text, *frames = asked["messages"][0]["content"]
    assert text["text"].startswith("These are frames") and "a dog runs" in text["text"]
    assert "to 10 (as in the world)" in text["text"]
    assert [each["image_url"]["url"] for each in frames] == [data_url(video[n]) for n in (0, 4, 8)]
    of_two: Any = request(table, video[:2], "x")
    assert len(of_two["messages"][0]["content"]) == 3
