"""Each process of a local run has a GPU of its own, as far as there are any."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from digenrl.local.checking import preflight
from digenrl.local.processes.assignment import Assignment, assign_gpus
from digenrl.local.processes.gpus import parse_nvidia_smi, visible_cards, visible_gpus
from digenrl.local.running.command_lines import worker_programs
from digenrl.local.secrets.keys import Keys
from digenrl.planning.entries import Processes
from digenrl.planning.ledger import Card
from shared.errors import UserError
from shared.recipe.recipe import Recipe, load_recipe, override
from tests.paths import RECIPES

MODELS = ("sd35-medium", "flux1-dev", "qwen-image", "wan2.1-14b", "hunyuanvideo")
STATED = {"": 8, ".1-gpu": 1, ".mixed": 24}
"""GPUs of the machine that a recipe is for, by its name's end."""


def recipe_of(name: str, **changes: object) -> Recipe:
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return override(load_recipe(RECIPES / f"{name}.toml"), given)


def numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def cards(*names: str, gib: float | None = None) -> list[Card]:
    """GPUs of a machine whose driver says how much memory each has, or does not."""
    return [Card(name, "NVIDIA H100 80GB HBM3" if gib else "", gib) for name in names]


def shown(assignment: Assignment) -> dict[str, str]:
    return {
        name: visible["CUDA_VISIBLE_DEVICES"] for name, visible in assignment.environments.items()
    }


def environments(recipe: Recipe, gpus: list[str], folder: Path) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each worker that `digenrl up` would start."""
    processes = Processes.of_run(recipe)
    assignment = assign(recipe, cards(*gpus))
    return {
        program.name: program.environment["CUDA_VISIBLE_DEVICES"]
        for program in worker_programs(recipe, processes, Keys(folder), assignment.environments)
    }


def assign(recipe: Recipe, of: Sequence[Card]) -> Assignment:
    """GPUs of `digenrl up`."""
    return assign_gpus(recipe, of, Processes.of_run(recipe))


@pytest.mark.parametrize("name", [f"{model}{size}" for model in MODELS for size in STATED])
def test_a_shipped_recipe_fills_the_gpus_that_it_states(name: str, tmp_path: Path) -> None:
    recipe = recipe_of(name)
    gpus = numbers(STATED[next(size for size in (".1-gpu", ".mixed", "") if name.endswith(size))])
    found = environments(recipe, gpus, tmp_path)
    trained = recipe.trainer.devices
    assert [found[f"trainer-{number}"] for number in range(trained)] == gpus[:trained]
    rollouts = [found[f"rollout-{number}"] for number in range(recipe.rollout.workers)]
    assert rollouts == gpus[trained:], "one each, in order, and none is left over"
    assert {found[f"reward-{number}"] for number in range(recipe.reward.workers)} == {""}
    workers = recipe.rollout.workers + recipe.reward.workers + recipe.encoder.workers
    assert len(found) == trained + workers


def test_the_demo_leaves_gpus_alone() -> None:
    assert set(shown(assign(recipe_of("digits"), cards(*numbers(8)))).values()) == {""}
    assert set(shown(assign(recipe_of("digits-nft"), ())).values()) == {""}


def test_names_are_passed_on_as_they_are() -> None:
    recipe = recipe_of(
        "sd35-medium", trainer__devices=2, rollout__workers=1, schedule__mode="disaggregated"
    )
    found = shown(assign(recipe, cards("GPU-a", "GPU-b", "GPU-c")))
    given = found["trainer-0"], found["trainer-1"], found["rollout-0"]
    assert given == ("GPU-a", "GPU-b", "GPU-c")
    assert found["report"] == "GPU-a", "the others have ended by then"


NETWORK = [{"name": "taste", "type": "pick-score", "folder": "."}]


@pytest.mark.parametrize(
    ("count", "rewards", "evaluator", "at_end", "warned"),
    [
        (2, ["", ""], "0", True, True),
        (3, ["2", "2"], "2", False, False),
        (4, ["2", "3"], "2", False, False),
        (5, ["2", "3"], "4", False, False),
    ],
)
def test_reward_networks_and_the_evaluator_take_what_is_left(
    count: int, rewards: list[str], evaluator: str, at_end: bool, warned: bool
) -> None:  # fmt: skip
    recipe = recipe_of(
        "sd35-medium", trainer__devices=1, rollout__workers=1, reward__workers=2,
        reward__scorers=NETWORK, evaluation__every=5,
    )  # fmt: skip
    assignment = assign(recipe, cards(*numbers(count)))
    found = shown(assignment)
    assert [found["reward-0"], found["reward-1"]] == rewards
    assert (found["evaluator"], assignment.evaluates_at_end) == (evaluator, at_end)
    assert bool(assignment.warnings) == warned
    assert len(assignment.warnings) == (2 if warned else 0)
    if warned:
        assert "networks of the rewards; they run on the CPU" in assignment.warnings[0]
        assert "no GPU has enough memory for the evaluator" in assignment.warnings[1]


@pytest.mark.parametrize(
    ("count", "encoders", "evaluator", "at_end"),
    [(2, ["", ""], "0", True), (3, ["2", "2"], "2", False), (5, ["2", "3"], "4", False)],
)
def test_encoders_take_what_is_left_or_run_on_the_cpu_with_a_warning(
    count: int, encoders: list[str], evaluator: str, at_end: bool
) -> None:
    recipe = recipe_of(
        "sd35-medium", trainer__devices=1, rollout__workers=1, encoder__workers=2,
        evaluation__every=5,
    )  # fmt: skip
    assignment = assign(recipe, cards(*numbers(count)))
    found = shown(assignment)
    assert [found["encoder-0"], found["encoder-1"]] == encoders
    assert (found["evaluator"], assignment.evaluates_at_end) == (evaluator, at_end)
    warned = "encoder.workers: no GPU has enough memory for the encoders; they run on the CPU"
    assert assignment.warnings[:1] == ((warned,) if count == 2 else ())


@pytest.mark.parametrize(("gib", "shares"), [(79.6, True), (23.5, False)])
def test_networks_of_rewards_share_the_gpus_of_members_where_they_fit(
    gib: float, shares: bool
) -> None:
    """They ran on a CPU thread each: 1,000 s of a step of 100, and the evaluator after the run."""
    recipe = recipe_of(
        "flux1-dev" if gib > 79 else "sd35-medium", reward__scorers=NETWORK, reward__workers=2,
        evaluation__every=5,
    )  # fmt: skip
    assignment = assign(recipe, cards(*numbers(8), gib=gib))
    found = shown(assignment)
    assert [found["reward-0"], found["reward-1"]] == (["0", "1"] if shares else ["", ""])
    left = assignment.environments["trainer-0"].get("DIGENRL_MEMORY_GIB")
    assert (left is not None and 60 < float(left) < gib - 4) is shares
    assert assignment.evaluates_at_end is not shares
    assert found["evaluator"] == ("2" if shares else "0")
    assert len(assignment.notes) == (2 if shares else 0)


def test_an_evaluator_streams_the_network_where_it_does_not_fit_whole() -> None:
    recipe = recipe_of("qwen-image", evaluation__every=5, encoder__workers=1)
    assignment = assign(recipe, cards(*numbers(8), gib=79.6))
    evaluator = assignment.environments["evaluator"]
    assert evaluator.get("DIGENRL_ROLLOUT_MEMORY") == "streamed"
    assert not assignment.evaluates_at_end
    assert "and streams the network" in assignment.notes[-1]


def test_encoders_that_are_to_run_on_the_cpu_take_no_gpu_and_need_no_warning() -> None:
    recipe = recipe_of(
        "sd35-medium", trainer__devices=1, rollout__workers=1, encoder__workers=1,
        encoder__device="cpu", evaluation__every=5,
    )  # fmt: skip
    assignment = assign(recipe, cards(*numbers(3)))
    assert (shown(assignment)["encoder-0"], assignment.warnings) == ("", ())
    assert shown(assignment)["evaluator"] == "2"


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (7, "8 GPUs needed (4 to train, 4 to generate), 7 found"),
        (0, "8 GPUs needed (4 to train, 4 to generate), none found"),
    ],
)
def test_too_few_are_refused_in_one_line_with_the_remedies(count: int, said: str) -> None:
    recipe = recipe_of(
        "sd35-medium", trainer__devices=4, rollout__workers=4, schedule__mode="disaggregated"
    )
    with pytest.raises(UserError) as raised:
        assign(recipe, cards(*numbers(count)))
    line = str(raised.value)
    assert line.startswith("trainer.devices, rollout.workers: ") and "\n" not in line
    assert said in line and 'set model.device = "cpu"' in line and "CUDA_VISIBLE_DEVICES" in line


PRINTED = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5d5ba0d6)
  MIG 3g.40gb     Device  0: (UUID: MIG-d184f67c)
  MIG 3g.40gb     Device  1: (UUID: MIG-d184f67d)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-5d5ba0d7)
"""


def test_a_gpu_that_is_cut_into_slices_counts_as_them() -> None:
    assert parse_nvidia_smi(PRINTED) == ("MIG-d184f67c", "MIG-d184f67d", "1")


DRIVER = """#!/bin/sh
if [ "$1" = -L ]; then cat <<'END'
{listed}END
else
    echo '0, GPU-5d5ba0d6, NVIDIA A100-SXM4-80GB, 81920'
    echo '1, GPU-5d5ba0d7, NVIDIA A100-SXM4-80GB, 81920'
fi
"""


def test_cards_have_the_memory_that_the_driver_says_and_slices_their_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(DRIVER.replace("{listed}", PRINTED))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    part, _, whole = visible_cards()
    assert (part.name, part.kind) == ("MIG-d184f67c", "NVIDIA A100-SXM4-80GB 3g.40gb")
    assert part.gib == pytest.approx(37.25, abs=0.01)
    assert whole == Card("1", "NVIDIA A100-SXM4-80GB", 80.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5d5ba0d7,MIG-d184f67d")
    assert [card.gib for card in visible_cards()] == [80.0, part.gib]


def test_the_machine_is_asked_unless_the_variable_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$1" = -L ] && printf "GPU 0: A\\nGPU 1: B\\n"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ("0", "1")
    for visible, seen in {"": (), "5,3": ("5", "3"), "2,-1,3": ("2",)}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert visible_gpus() == seen
    program.write_text("#!/bin/sh\nexit 9\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UserError, match="name them in CUDA_VISIBLE_DEVICES"):
        visible_gpus()


def test_a_machine_without_enough_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    plain = recipe_of("digits").model_dump(mode="json")
    del plain["model"]["device"]
    path = tmp_path / "recipe.json"
    path.write_text(Recipe.model_validate(plain).model_dump_json())
    request = preflight.UpRequest(path, {}, resume=False, port=0, runs=tmp_path / "runs")
    with pytest.raises(UserError, match="3 GPUs needed"):
        preflight.prepare(request)
    assert not (tmp_path / "runs").exists()
