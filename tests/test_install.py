"""What an installation holds: every package that recipes name, and the data that is no code."""

import json
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from services.reward.kinds import KINDS
from shared.errors import how_to_install
from shared.recipe.recipe import load_recipe
from tests.paths import ROOT

EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
IN_THE_BUILD = {
    "bench",
    "digenrl",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "services",
    "shared",
    "tests",
}
RECIPE = """
[run]
name = "installed"
steps = 3

[model]
folder = "flux1-dev"
height = 512
width = 512

[data]
prompts = "prompts.txt"

[batch]
groups = 8
group_size = 4

[sampling]
steps = 6
window = 3

[[reward.scorers]]
name = "noise"
type = "jpeg-incompressibility"

[trainer]
learning_rate = 1e-4
"""


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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of what git tracks; building it leaves folders beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    ).stdout.splitlines()
    for name in listed:
        if name.split("/")[0] in IN_THE_BUILD and (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "source" / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-P", "-m", "pip", "wheel", "--quiet", "--no-deps",
         "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source")],
        check=True, timeout=240,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The bin folder of an environment with the wheel, and with this one's dependencies.

    They are on its path by a line of a .pth file, which does not run the .pth files there: that of
    the editable installation, which would put the clone on the path, is none of them.
    """
    environment = wheel.parent / "venv"
    venv.create(environment, with_pip=False)
    binaries = environment / "bin"
    subprocess.run(
        [sys.executable, "-P", "-m", "pip", "--quiet", "--disable-pip-version-check",
         "--python", str(binaries / "python"), "install", "--no-deps", "--no-index", str(wheel)],
        check=True, timeout=240,
    )  # fmt: skip
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return binaries


def run_installed(program: Path, *arguments: str, folder: Path) -> str:
    ended = subprocess.run(
        [str(program), *arguments], cwd=folder, env={"PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_a_wheel_holds_neither_benchmarks_nor_tests(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in ZipFile(wheel).namelist()}
    assert tops == {
        "digenrl",
        "services",
        "shared",
        f"{'-'.join(wheel.name.split('-')[:2])}.dist-info",
    }


@pytest.mark.slow
def test_an_installed_wheel_plans_and_checks_from_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    digenrl, python = installed / "digenrl", installed / "python"
    packages = run_installed(
        python, "-P", "-c", "import digenrl, services, shared; "
        "print(*(m.__path__[0] for m in (digenrl, services, shared)), sep='\\n')",
        folder=tmp_path,
    ).splitlines()  # fmt: skip
    assert all(Path(path).is_relative_to(installed.parent) for path in packages)
    assert "Usage: digenrl" in run_installed(digenrl, "--help", folder=tmp_path)

    planning = ("plan", "--profile", "flux1-dev", "--devices", "h100=4", "--json")
    planned = json.loads(run_installed(digenrl, *planning, folder=tmp_path))
    assert planned["profile"] == "flux1-dev" and planned["choices"]

    assert not list(tmp_path.iterdir())
    (tmp_path / "prompts.txt").write_text("a sign\n" * 32)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    checking = ("check", "recipe.toml", "--elsewhere", "--devices", "h100=4", "--json")
    checked = json.loads(run_installed(digenrl, *checking, folder=tmp_path))
    assert checked["ok"] and checked["forecast"]["profile"] == "flux1-dev"


@pytest.mark.slow
def test_an_installed_wheel_has_every_cost_profile(installed: Path, tmp_path: Path) -> None:
    known = run_installed(
        installed / "python", "-P", "-c",
        "from services.scheduler.costs.profile import profile_names; print(*profile_names())",
        folder=tmp_path,
    ).split()  # fmt: skip
    assert known == sorted(
        path.stem for path in (ROOT / "services/scheduler/costs/profiles").glob("*.json")
    )
