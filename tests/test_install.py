"""What an installation holds: every package that recipes name, and the data that is no code."""

import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from services.reward.scorer import KINDS
from shared.errors import how_to_install
from shared.recipe.recipe import load_recipe

ROOT = Path(__file__).parents[1]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def included(extra: str) -> set[str]:
    """The extra, and every other that it asks for."""
    found = {extra}
    for wanted in EXTRAS[extra]:
        if wanted.startswith("digenrl["):
            names = wanted.removeprefix("digenrl[").removesuffix("]").split(",")
            found |= {each for name in names for each in included(name)}
    return found


def rewards_of_shipped_recipes() -> set[str]:
    recipes = [load_recipe(path) for path in (ROOT / "recipes").glob("*.toml")]
    return {
        KINDS[scorer.type].extra
        for recipe in recipes
        for scorer in (*recipe.reward.scorers, *recipe.evaluation.scorers)
    }


def test_make_install_brings_what_shipped_recipes_and_the_demo_use() -> None:
    assert rewards_of_shipped_recipes() | {"data", "tensorboard"} <= included("all")


def test_the_image_of_the_reward_service_can_run_every_reward() -> None:
    (line,) = [line for line in DOCKERFILE.splitlines() if "--extra reward" in line]
    words = line.split()
    installed = {words[i + 1] for i, word in enumerate(words) if word == "--extra"}
    assert {kind.extra for kind in KINDS.values()} <= installed


@pytest.mark.parametrize("extra", sorted({kind.extra for kind in KINDS.values()} | {"data"}))
def test_a_missing_extra_is_named_with_a_command_that_works_without_an_index(extra: str) -> None:
    assert extra in EXTRAS
    said = how_to_install(extra)
    assert f'-e ".[{extra}]"' in said and "digenrl[" not in said
    assert (ROOT / "constraints.txt").is_file()


@pytest.mark.slow
def test_an_installed_wheel_has_the_cost_profiles(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves folders in it
    listed = subprocess.run(
        ["git", "ls-files", "digenrl", "services", "shared", "*.toml", "README.md"],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=60,
    ).stdout.split()  # fmt: skip
    for name in listed:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
         "--wheel-dir", str(tmp_path), str(source)],
        check=True, timeout=240,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    listed_profiles = subprocess.run(
        [sys.executable, "-P", "-c",
         "import services; from digenrl.planning.requests import known_profiles as known; "
         "print(services.__path__[0], *known())"],
        cwd=tmp_path, env={"PYTHONPATH": str(site), "PATH": ""},
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout.split()  # fmt: skip
    assert listed_profiles[0] == str(site / "services")
    assert listed_profiles[1:] == sorted(
        path.stem for path in (ROOT / "services/scheduler/costs/profiles").glob("*.json")
    )
