"""A trainer of several processes, through the real services."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import psutil
import pytest

from shared.recipe.recipe import load_recipe, override
from tests.e2e.local_run import SMALL, LocalRun, StartRun
from tests.e2e.test_families import check_trained, recipe_of
from tests.paths import DIGITS

pytestmark = [pytest.mark.run, pytest.mark.timeout(900)]

Write = Callable[[dict[str, Any]], Path]


@pytest.fixture
def recipe_with(tmp_path: Path) -> Write:
    def write(changes: dict[str, Any]) -> Path:
        path = tmp_path / "ranks.json"
        recipe = override(load_recipe(DIGITS), {**SMALL, "trainer.devices": 2, **changes})
        path.write_text(recipe.model_dump_json())
        return path

    return write


def ranks(run: LocalRun) -> list[psutil.Process]:
    """The trainer's, of this run."""
    [launcher] = [
        process
        for process in psutil.Process(run.process.pid).children()
        if "digenrl.local.ranks" in process.cmdline()
    ]
    found: list[psutil.Process] = launcher.children()
    return found


@pytest.mark.slow
def test_two_ranks_train_and_when_one_dies_nothing_is_lost_or_trained_twice(
    start_run: StartRun, tmp_path: Path
) -> None:
    steps = 3
    path = tmp_path / "two.json"
    ranks_of_hosts = {"trainer.devices": 2, "trainer.hosts": 2}
    two = override(load_recipe(recipe_of("flux", tmp_path)), ranks_of_hosts)
    path.write_text(two.model_dump_json())
    run = start_run("--steps", str(steps), recipe=path)
    run.wait_for(lambda view: view["step"] >= 1)
    follower = max(ranks(run), key=lambda process: process.pid)
    follower.kill()
    summary = run.finish()
    check_trained("flux", run, summary, steps=steps)


@pytest.mark.slow
def test_all_weights_are_trained_by_ranks_that_hold_a_share_each(
    start_run: StartRun, recipe_with: Write
) -> None:
    changes = {
        "model.trained": "full", "trainer.sharded": True, "trainer.learning_rate": 1e-5,
        "trainer.updates": 3, "trainer.ema": 0.5, "algorithm.kl_beta": 0.0,
    }  # fmt: skip
    path = recipe_with(changes)
    run = start_run("--steps", "2", recipe=path)
    summary = run.finish()
    assert summary["commits"] == 2
    assert summary["onpolicy_ratio_error_max"] <= 1e-5
    assert summary["reward_before"] != summary["reward_after"]
    network = diffusers.SD3Transformer2DModel.from_pretrained(
        run.folder / "adapter" / "transformer"
    )
    base = diffusers.SD3Transformer2DModel.from_pretrained(
        load_recipe(path).model.folder / "transformer"
    )
    changed = [
        float((mine - theirs).detach().abs().max())
        for mine, theirs in zip(network.parameters(), base.parameters(), strict=True)
    ]
    assert sum(each > 0 for each in changed) > 0.9 * len(changed)
