"""Every recipe that we ship can run; broken ones are told why in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from digenrl.checking import check
from shared.errors import UserError
from shared.recipe import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
MODELS = ("sd35-medium", "flux1-dev", "qwen-image", "wan2.1-14b", "hunyuanvideo")
DEVICES = {"": "h100=8", ".1-gpu": "h100=1", ".mixed": "h100=8,a100=16"}
SHIPPED = [f"{model}{size}" for model in MODELS for size in DEVICES]


def test_there_are_recipes_for_every_model_and_size() -> None:
    found = {path.stem for path in RECIPES.glob("*.toml")}
    assert found == {*SHIPPED, "digits", "digits-nft"}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_passes(path: Path) -> None:
    first, *rest = check(path, None, None)
    assert first.startswith(f"{path}: ")
    assert all("is not here" in line for line in rest), "weights are too large to ship"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recipe_s_devices_are_those_that_it_says(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.toml")
    devices = recipe.rollout.workers + recipe.trainer.devices
    size = next(size for size in (".1-gpu", ".mixed", "") if name.endswith(size))
    assert devices == {"": 8, ".1-gpu": 1, ".mixed": 24}[size]
    assert recipe.schedule.mode == ("colocated" if size == ".1-gpu" else "pipelined")


@pytest.mark.parametrize("model", MODELS)
def test_one_gpu_is_enough(model: str) -> None:
    lines = list(check(RECIPES / f"{model}.1-gpu.toml", "h100=1", None))
    assert f"by the cost profile {model}: " in lines[-2]
    assert "generating none of their own, training 1 H100" in lines[-2]
    assert "H100 has 79" in lines[-1]


def test_a_mixed_pool_is_planned() -> None:
    lines = list(check(RECIPES / "sd35-medium.mixed.toml", "h100=4,l40s=4", None))
    assert " s per step, devices " in lines[-2]
    assert "L40S" in lines[-2] and "H100" in lines[-2]


BROKEN = {
    "a key that nobody knows": ("window = 3", "windw = 3", "did you mean window?"),
    "no arithmetic": (
        "group_size = 24",
        "group_size = 24\n[schedule]\nfragment_size = 7",
        "6 and 8",
    ),
    "a window too long": ("window = 3", "window = 9", "window: 9 steps from step 2 reach past"),
    "another algorithm": ('name = "cps"', 'name = "csp"', "algorithm.name: "),
    "another transition": (
        "noise_level = 0.8",
        'variant = "flow"',
        "sampling.variant: cps does not",
    ),
    "no such reward": ('type = "ocr"', 'type = "orc"', "no scorer is called 'orc'"),
    "no prompts": ("prompts/signs.txt", "prompts/sings.txt", "data.prompts: cannot read"),
    "no devices that generate": ("workers = 4", "workers = 0", "rollout.workers: 0 needs"),
    "no size": ("height = 512", "height = 0", "model.height: "),
    "no TOML": ("[batch]", "[batch", "not TOML"),
    "a base that is not there": ("[run]", 'base = "nowhere.toml"\n[run]', "cannot read the recipe"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_recipe_gives_one_clear_line(broken: str, tmp_path: Path) -> None:
    old, new, said = BROKEN[broken]
    text = (RECIPES / "flux1-dev.toml").read_text().replace('"prompts/', f'"{RECIPES}/prompts/')
    assert old in text
    path = tmp_path / "broken.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as raised:
        list(check(path, None, None))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("4090=2", "needs"),
        ("h100", "--devices: "),
        ("b300=8", "knows no b300"),
    ],
)
def test_devices_that_will_not_do_are_refused(devices: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        list(check(RECIPES / "wan2.1-14b.toml", devices, None))


def test_the_command_says_it_on_standard_error(tmp_path: Path) -> None:
    path = tmp_path / "ring.toml"
    path.write_text('base = "ring.toml"')
    ended = subprocess.run(
        [sys.executable, "-m", "digenrl", "check", str(path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "is it a ring?" in ended.stderr and ended.stderr.count("\n") == 1
