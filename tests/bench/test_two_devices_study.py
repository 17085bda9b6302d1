import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.runner.placement import cpu_seconds, pinned, place
from bench.two_devices.modes import Part, modes_of
from bench.two_devices.study import (
    NETWORK,
    WINDOW,
    Study,
    Wanted,
    about,
    ensure_model,
    model_folder,
    plan_study,
)
from shared.errors import UserError
from shared.recipe.recipe import load_recipe
from tests.paths import DIGITS


def planned(part: Part, only: Sequence[str] = ()) -> Study:
    wanted = Wanted(
        recipe=DIGITS, parts=(part,), modes=tuple(only), rounds=2, batches=3, slowdown=3.0
    )
    return plan_study(wanted, part, Path("/model"))


@pytest.mark.parametrize("part", ["equal", "slowed"])
def test_every_mode_is_a_recipe_with_one_thread_per_device(part: Part) -> None:
    study = planned(part)
    for each in study.modes:
        recipe = study.recipe_of(each, 1)
        assert recipe.model.folder == Path("/model")
        assert recipe.trainer.threads == recipe.rollout.threads == 1
        measured = each.most_batches or 3
        assert recipe.run.steps == each.warm_up + measured + 1
        assert recipe.run.name == f"{part}-{each.slug}-1"
        assert recipe.reward == load_recipe(DIGITS).reward


def test_each_mode_is_the_one_before_and_one_technique_more() -> None:
    sequential, *more = modes_of("equal", window=WINDOW, group_size=24)
    changed = []
    for before, after in itertools.pairwise([sequential, *more]):
        both = {key for key in after.changes if before.changes[key] != after.changes[key]}
        changed.append((after.name, both))
    assert changed == [
        ("+GAP", {"schedule.mode"}),
        ("+TSP", {"schedule.tsp_steps"}),
        ("+TAG", {"schedule.tag"}),
        ("+one step", {"schedule.max_staleness"}),
    ]


def test_only_the_slowed_part_is_slowed_and_has_a_run_of_the_fast_device_alone() -> None:
    assert planned("equal").slowdown == 1.0
    study = planned("slowed")
    assert study.slowdown == 3.0
    alone = next(each for each in study.modes if each.name == "fast alone")
    assert study.recipe_of(alone, 0).rollout.workers == 0


def test_what_is_kept_of_a_study_names_the_model_and_not_where_it_is() -> None:
    told = about([planned("equal")], place([0, 1], str))["changes"]["equal"]
    assert told.startswith("model.folder = model, ")
    assert "/" not in told


def test_a_mode_that_no_part_has_is_refused_by_name() -> None:
    assert [each.name for each in planned("equal", ["+GAP", "sequential"]).modes] == [
        "sequential",
        "+GAP",
    ]
    with pytest.raises(UserError, match=r"none of these; known are: sequential, \+GAP"):
        planned("equal", ["+TGA"])


def test_a_model_is_made_once(tmp_path: Path) -> None:
    made = model_folder(tmp_path, NETWORK)
    made.mkdir()
    assert ensure_model(tmp_path, NETWORK, seed=0) == made
    assert list(made.iterdir()) == []


def test_devices_take_two_cores_and_the_others_what_is_left() -> None:
    pairs = place(range(8), lambda cpu: str(cpu // 2))
    assert (pairs.rollout, pairs.trainer, pairs.others) == (0, 2, (4, 5, 6, 7))
    assert not pairs.shared
    two = place([3, 5], str)
    assert (two.rollout, two.trainer, two.others) == (3, 5, (3, 5))
    assert two.shared
    with pytest.raises(UserError, match="two devices need two cores, and this process may use 1"):
        place([0, 1], lambda cpu: "the same core")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins processes")
def test_a_pinned_program_runs_on_its_core() -> None:
    cpu = max(os.sched_getaffinity(0))
    program = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
    said = subprocess.run(pinned(program, [cpu]), capture_output=True, text=True, check=True).stdout
    assert said == f"{{{cpu}}}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.clock
def test_cpu_seconds_are_those_of_the_process_and_none_once_it_is_gone() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    assert 0.25 <= cpu_seconds(process.pid) <= 2
    process.communicate(b"\n")
    assert cpu_seconds(process.pid) == 0.0
