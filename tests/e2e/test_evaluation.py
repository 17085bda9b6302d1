"""A run that is evaluated and followed while it is trained, and what it leaves; the same run killed
and resumed: all services and brokers are real.

Starting the services takes most of the time, so one test does several things with its run, in the
worst of all surroundings. What needs no real model is shown on the emulated cluster as well, in
seconds (tests/storm).
"""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner

from digenrl.commands.cli import app
from digenrl.local.brokers.embedded import plan_brokers
from digenrl.local.secrets.keys import load_keys
from shared.learning.metrics import STEP_METRICS
from shared.process.settings import ServiceSettings
from shared.recipe.recipe import load_recipe, override
from shared.store import open_store
from tests.brokers import StartProgram, program
from tests.e2e.local_run import LocalRun, StartRun, wait_until
from tests.e2e.surroundings import WORST, check_left
from tests.e2e.test_families import GROUPS, SIZE, check_trained, recipe_of
from tests.e2e.test_schedule import child, logged
from tests.paths import DIGITS

pytestmark = [pytest.mark.run, pytest.mark.timeout(900)]

STEPS = 3
DUE = [0, 2, 3]
CHANGES = {"run.name": "small", "evaluation.every": 2}
PICTURES = 4
"""Pictures of an evaluated version: two prompts, two samples of each."""


def test_a_run_is_evaluated_followed_and_reported(
    start_run: StartRun, start: StartProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = WORST.make(tmp_path)
    prompts, path = folder / WORST.prompts_file, folder / "rezept ü.json"
    recipe = load_recipe(recipe_of("wan", folder))
    WORST.protect(recipe.model.folder)
    path.write_text(override(recipe, {**CHANGES, "data.prompts": prompts}).model_dump_json())
    run = start_run(
        "--steps", str(STEPS), "--deterministic", "--rollout.workers", "1",
        "--tensorboard", str(tmp_path / "tb"), recipe=path, place=WORST,
    )  # fmt: skip
    check_page(run)
    wait_until(lambda: bool(run_log(run.folder)), 120)
    child(run, "evaluate").kill()
    summary = run.finish()
    check_trained("wan", run, summary, steps=STEPS)
    assert summary["schedule"]["staleness"] == {"0": STEPS * GROUPS * SIZE}
    check_evaluations(run, summary)
    check_curves(tmp_path / "tb", summary)
    check_card(run)
    check_left(folder, run.folder, run.output)
    assert str(run.folder / "summary.json") in run.output
    follow_by_name_alone(run, tmp_path / "again")
    check_curves(tmp_path / "again", summary)

    brokers = plan_brokers(run.folder, load_keys(run.folder))
    start(program(brokers, "objects"))
    for key, value in (brokers.environment | brokers.owner).items():
        monkeypatch.setenv(key, value)
    keys, found = asyncio.run(kept())
    assert [record["policy"]["version"] for record in found] == DUE
    assert {record["worker"] for record in found} == {"evaluator"}
    named = {sample["media"]["key"] for record in found for sample in record["samples"]}
    assert {key for key in keys if key.endswith(".mp4")} == named
    assert len(named) > PICTURES, "other pictures by other versions"


@pytest.mark.slow
def test_a_run_has_the_same_bytes_if_killed_and_resumed(
    start_run: StartRun, tmp_path: Path
) -> None:
    """It is killed as a whole, and continues with other workers."""
    recipe = recipe_of("wan", tmp_path)
    start = partial(start_run, "--steps", str(STEPS), "--deterministic", recipe=recipe)
    expected = start("--rollout.workers", "1").finish()
    killed = start("--rollout.workers", "1", name="killed")
    killed.wait_for(lambda run: run["step"] >= 1)
    killed.kill_everything()
    found = start("--rollout.workers", "2", "--resume", name="killed").finish()
    assert found["commits"] == STEPS
    assert found["adapter_sha256"] == expected["adapter_sha256"]
    assert found["weights_digest"] == expected["weights_digest"]


@pytest.mark.slow
def test_an_evaluator_and_a_reward_network_on_the_device_of_generation_change_no_byte(
    start_run: StartRun,
) -> None:
    """The digits: their reward is a network, and all processes are on one device, the CPU."""
    start = partial(start_run, "--steps", "2", "--deterministic", recipe=DIGITS)
    alone = start(name="alone").finish()
    beside = start("--evaluation.every", "1", name="beside").finish()
    assert [each["version"] for each in beside["evaluations"]] == [0, 1, 2]
    assert beside["weights_digest"] == alone["weights_digest"]


def check_page(run: LocalRun) -> None:
    """The page is there before the run begins, and shows it to whoever has a token."""
    wait_until(lambda: (run.folder / "logs" / "view.log").exists(), 60)
    wait_until(lambda: bool(logged(run, "view", "listening")), 60)
    [address] = [entry["url"] for entry in logged(run, "view", "listening")]
    assert httpx.get(address).status_code == 401
    page = httpx.get(address, headers=run.tokens.headers("viewer")).text
    assert f"<title>{run.folder.name} - overview" in page


def follow_by_name_alone(run: LocalRun, folder: Path) -> None:
    """`digenrl follow` and `status` of a run that has ended, without a variable that says where its
    store is."""
    runs = ["--runs", str(run.folder.parent)]
    typed("follow", "small", *runs, "--tensorboard", str(folder))
    said = json.loads(typed("status", "small", *runs, "--json"))
    assert (said["status"], said["step"]) == ("finished", STEPS)


def typed(*words: str) -> str:
    """Return what a command writes to its standard output."""
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def check_evaluations(run: LocalRun, summary: dict[str, Any]) -> None:
    """Each due version was measured once, over both starts of the evaluator, and drawn."""
    assert [each["version"] for each in summary["evaluations"]] == DUE
    assert all(each["quality"]["num_samples"] == PICTURES for each in summary["evaluations"])
    assert summary["evaluations"][0]["quality"] == summary["before"]
    assert summary["evaluations"][-1]["quality"] == summary["after"]
    for name in ("evaluations.png", "progress.png", "gallery.png", "curve.png"):
        with Image.open(run.folder / name) as picture:
            assert picture.width > 400 and picture.height > 300
    done = [entry["version"] for entry in logged(run, "evaluator", "evaluated")]
    assert done == DUE, "each once, over both starts, and none is left to the report"


def check_curves(folder: Path, summary: dict[str, Any]) -> None:
    """Every step is a point of every curve of the metrics."""
    [run] = folder.iterdir()
    curves = EventAccumulator(str(run)).Reload()
    assert set(curves.Tags()["scalars"]) == {
        *STEP_METRICS,
        *(f"reward_{what}/{each}" for what in ("mean", "std") for each in ("texture", "calm")),
    }
    for tag in curves.Tags()["scalars"]:
        assert [event.step for event in curves.Scalars(tag)] == list(range(1, STEPS + 1)), tag
    rewards = [event.value for event in curves.Scalars("reward_mean")]
    assert rewards == pytest.approx(summary["reward_per_step"], abs=1e-5)


def check_card(run: LocalRun) -> None:
    card = (run.folder / "adapter" / "README.md").read_text()
    assert f"{STEPS} optimizer steps on {STEPS * GROUPS * SIZE} samples" in card
    assert (run.folder / "adapter" / "curve.png").stat().st_size > 10_000


async def kept() -> tuple[list[str], list[dict[str, Any]]]:
    """Keys of all that evaluations have left in the store, and their records."""
    store = open_store(ServiceSettings(run="small").store)
    keys = await store.keys("small/evaluations")
    found = [json.loads(await store.read(key) or b"") for key in keys if "/records/" in key]
    return keys, found


def run_log(folder: Path) -> list[str]:
    """Lines of the evaluator that say that a version is being evaluated."""
    path = folder / "logs" / "evaluator.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if '"evaluating"' in line]
