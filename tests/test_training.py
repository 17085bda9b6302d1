"""`digenrl.train`: what another program asks, and a reward that is a function of that program."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import digenrl
from digenrl.reward_server import Reward, RewardServer
from services.reward.scorers.remote import RemoteScorer
from shared.errors import SamplesFailed, ScoringError
from shared.process.outgoing import allow
from shared.recipe.rewards import Remote

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
ROWS = [
    {"prompt": f"a handwritten {word}", "metadata": {"digit": digit}}
    for digit, word in enumerate(DIGITS)
]
SMALL = {
    "run.steps": 2, "batch.groups": 4, "batch.group_size": 4, "trainer.micro_batch": 4,
    "schedule.fragment_size": 4, "evaluation.samples_per_prompt": 1,
}  # fmt: skip


class Rewards:
    """Makes servers of functions, and the scorers by which reward workers request them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.servers = folder, list[RewardServer]()

    def scorer(self, function: Reward, token: str = "") -> RemoteScorer:
        server = RewardServer(function)
        self.servers.append(server)
        (self.folder / "key").write_text(token or server.token)
        allow([server.url])
        return RemoteScorer(server.url, Remote(key_file=self.folder / "key"), patience=10)


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rewards]:
    monkeypatch.setenv("DIGENRL_PRIVATE_HOSTS", "")
    made = Rewards(tmp_path)
    yield made
    for server in made.servers:
        server.close()


def test_a_function_is_given_what_it_names(rewards: Rewards) -> None:
    media = np.zeros((2, 3, 4, 5), np.uint8)
    media[1, 0] = 255

    def red(image: Any, prompt: str, digit: int, metadata: Any, missing: float = 0.5) -> float:
        assert image.shape == (4, 5, 3) and prompt == "a five" and metadata["digit"] == digit
        return float(image[..., 0].mean()) + digit + missing

    metadata = [{"prompt": "a five", "digit": 5}] * 2
    assert rewards.scorer(red).score(media, metadata) == [5.5, 260.5]
    video = media[None].repeat(2, axis=0)
    video[1] = 0
    assert rewards.scorer(red).score(video, metadata) == [133.0, 5.5]
    frames = rewards.scorer(lambda frames: len(frames) + frames.shape[-1])
    assert frames.score(video, metadata) == [5.0, 5.0]


def test_an_error_costs_its_sample_and_reaches_the_caller(
    rewards: Rewards, caplog: pytest.LogCaptureFixture
) -> None:
    def inverse(image: Any) -> float:
        return 1.0 / int(image.max())

    scorer = rewards.scorer(inverse)
    media = np.stack([np.zeros((3, 2, 2), np.uint8), np.ones((3, 2, 2), np.uint8)])
    with pytest.raises(SamplesFailed) as failed:
        scorer.score(media, [{}, {}])
    assert list(failed.value.scores) == [None, 1.0]
    assert "ZeroDivisionError" in failed.value.reasons[0]
    assert isinstance(rewards.servers[0].error, ZeroDivisionError)
    assert "in inverse" in caplog.text
    for value, reason in ((float("nan"), "not a finite number"), ("much", "could not convert")):
        with pytest.raises(SamplesFailed, match=reason):
            rewards.scorer(lambda image, value=value: value).score(media[:1], [{}])


def test_who_has_not_the_token_gets_no_score(rewards: Rewards) -> None:
    scorer = rewards.scorer(lambda image: 1.0, token="guessed")
    with pytest.raises(ScoringError, match="refuses: 401"):
        scorer.score(np.zeros((1, 3, 2, 2), np.uint8), [{}])


def test_what_is_wrong_is_raised_before_anything_is_trained(tmp_path: Path) -> None:
    def begin(reward: Any, **more: Any) -> None:
        digenrl.train(recipe="digits", prompts=ROWS, reward=reward, runs=tmp_path, **more)

    with pytest.raises(ZeroDivisionError):
        begin(lambda image, digit: 1 / 0)
    with pytest.raises(TypeError, match="takes 'colour', which is not in the prompt's metadata"):
        begin(lambda image, colour: 1.0)
    with pytest.raises(TypeError, match="neither `image` nor `frames`"):
        begin(lambda prompt: 1.0)
    with pytest.raises(digenrl.TrainingFailed, match="grups: unknown key; did you mean groups"):
        begin({"name": "noise", "type": "jpeg-compressibility"}, keys={"batch.grups": 3})
    with pytest.raises(TypeError, match=r"give a function, a file\.py:function, or"):
        begin(None)
    assert [path.name for path in tmp_path.iterdir()] == ["train.inputs"]


@pytest.mark.parametrize(("gpus", "on_cpu"), [("", True), ("0", False)])
def test_a_run_without_a_recipe_uses_the_cpu_if_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, on_cpu: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    with pytest.raises(digenrl.TrainingFailed, match="grups: unknown key"):
        digenrl.train(
            model=tmp_path, prompts=ROWS, reward={"name": "noise", "type": "jpeg-compressibility"},
            runs=tmp_path, keys={"batch.grups": 3},
        )  # fmt: skip
    recipe = (tmp_path / "train.inputs" / "recipe.toml").read_text()
    assert ('model.device = "cpu"' in recipe) == on_cpu


def test_prompts_and_reward_may_be_files(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    asked = list[str]()

    def begin(prompts: Any, reward: Any) -> str:
        with pytest.raises(digenrl.TrainingFailed) as refused:  # before anything is trained
            keys = {"model.folder": "nowhere", "evaluation.digits": str(tmp_path)}
            digenrl.train(
                recipe="digits", prompts=prompts, reward=reward, runs=tmp_path, keys=keys
            ).wait(timeout=100)
        return str(refused.value)

    assert "my-prompts.txt cannot be read" in begin("my-prompts.txt", lambda image: 1.0)
    assert "holds no prompt" in begin([], lambda image: 1.0)
    file.write_text("a red car\na blue car\n")

    def uniform(image: Any, prompt: str) -> float:
        asked.append(prompt)
        return 1.0

    begin(file, uniform)
    assert asked == ["a red car"]
    assert "my_reward.py" in begin(str(file), "my_reward.py:score")


@pytest.mark.run
@pytest.mark.slow
def test_a_run_trains_by_a_function_and_one_that_breaks_is_the_cause(tmp_path: Path) -> None:
    def begin(name: str, last: float) -> digenrl.Training:
        calls = []

        def ink(image: Any, digit: int) -> float:
            calls.append(digit)
            if len(calls) > last:
                raise RuntimeError("the card is gone")
            return float(image.mean())

        return digenrl.train(
            recipe="digits", prompts=ROWS, reward=ink, name=name, runs=tmp_path, keys=SMALL
        )

    done = begin("whole", float("inf"))
    result = done.wait(timeout=200)
    assert result.summary["steps"] == 2 and done.progress.state == "finished"
    assert (result.adapter / "pytorch_lora_weights.safetensors").is_file()
    with done.client() as run:
        assert [each.version for each in run.list_versions()] == [2, 1, 0]
    with pytest.raises(digenrl.TrainingFailed) as failed:
        begin("broken", 1).wait(timeout=200)
    assert isinstance(failed.value.__cause__, RuntimeError)


@pytest.mark.run
@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    def begin() -> digenrl.Training:
        more = SMALL | {"run.steps": 6}
        return digenrl.train(
            recipe="digits", prompts=ROWS, reward=lambda image: float(image.mean()),
            name="again", runs=tmp_path, keys=more,
        )  # fmt: skip

    first = begin()
    while first.progress.step < 1:
        assert first.process.poll() is None
    first.stop()
    assert first.progress.step < 6
    assert begin().wait(timeout=200).summary["steps"] == 6
