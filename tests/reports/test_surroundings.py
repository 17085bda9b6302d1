"""Whole runs of two steps where people run them: odd folders, proxies, limits, no home.

The cases come from reports on other systems (a folder with a space, a company's proxy ...). One run
in the worst of all surroundings stands for them; `make test-all` has each by itself.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import tiny_models
from tests.paths import ROOT

PROMPTS = "a cat\na dog\n"
PATIENCE_S = 500
CLOSED = "http://127.0.0.1:9"
"""A proxy that does not answer."""
PROXIES = {
    case(name): CLOSED
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    for case in (str.upper, str.lower)
}
NO_PROXY = {"NO_PROXY": "localhost,.corp.example", "no_proxy": "localhost,.corp.example"}
RECIPE = """
[run]
name = "tiny"
steps = 2
[model]
folder = "{model}"
device = "cpu"
height = 32
width = 32
[data]
prompts = "{prompts}"
[sampling]
steps = 4
window = 2
[batch]
groups = 2
group_size = 4
[trainer]
learning_rate = 1e-3
[[reward.scorers]]
name = "j"
type = "jpeg-incompressibility"
[evaluation]
samples_per_prompt = 1
"""


@dataclass(frozen=True)
class Surroundings:
    folder: str = "plain"
    environment: dict[str, str] = field(default_factory=dict)
    shell: str = ""
    """Commands before it, in the same shell."""
    prompts: str = PROMPTS
    prompts_file: str = "p.txt"
    recipe: str = "recipe.toml"
    is_bare: bool = False
    """Whether the environment has nothing else than the path."""
    is_read_only: bool = False


LONG = f"{'a' * 100}/{'b' * 100}"
WORDS = "一只戴帽子的猫 🎩\nمرحبا قطة\nKatze – „süß“ <b>&amp;</b> $(id) `x`\n"
WORST = Surroundings(
    folder=f'ü my (1) runs, it\'s 模型 100%25 #1 "q" [x]/{"long " * 15}',
    environment=PROXIES | {"LC_ALL": "C"},
    shell="ulimit -n 1024;",
    prompts=WORDS,
    prompts_file="prömpts 模型.txt",
    recipe="rezept ü.toml",
    is_read_only=True,
)
CASES = {
    "plain": Surroundings(),
    "onespace": Surroundings("my runs"),
    "umlaut": Surroundings("müller"),
    "unicode": Surroundings(
        "my rüns 測試 (1)", {"LC_ALL": "C"}, prompts=WORDS, prompts_file="prömpts.txt"
    ),
    "quote": Surroundings('it\'s "so"'),
    "signs": Surroundings("a,b;c & d 50%20 #1?$HOME [x]"),
    "proxy": Surroundings(environment=PROXIES),
    "socks": Surroundings(environment={"ALL_PROXY": "socks5h://127.0.0.1:9"}),
    "noproxy": Surroundings(environment=PROXIES | NO_PROXY),
    "long": Surroundings(LONG),
    "files": Surroundings(shell="ulimit -n 256;"),
    "nohome": Surroundings(is_bare=True),
    "ro": Surroundings(is_read_only=True),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save("sd3", tmp_path_factory.mktemp("models") / "sd3")


@pytest.fixture
def writable(tmp_path: Path) -> Iterator[None]:
    """Lets pytest delete what a case has made read-only."""
    yield
    for path in tmp_path.rglob("*"):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | stat.S_IWUSR)


def up(place: Surroundings, tmp_path: Path, model: Path) -> "subprocess.CompletedProcess[str]":
    """Type `digenrl up` there, with the folder for temporary files and the home there as well."""
    folder = tmp_path / place.folder
    for each in (folder / "home", folder / "temporary"):
        each.mkdir(parents=True)
    copy = shutil.copytree(model, folder / "a model")
    if place.is_read_only:
        for path in copy.rglob("*"):
            path.chmod(path.stat().st_mode & ~0o222)
    (folder / place.prompts_file).write_text(place.prompts)
    (folder / place.recipe).write_text(RECIPE.format(model="a model", prompts=place.prompts_file))
    bare = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    here = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "temporary")}
    proxies = set(PROXIES) | set(NO_PROXY)
    inherited = {name: value for name, value in os.environ.items() if name not in proxies}
    environment = bare if place.is_bare else inherited | bare | here | place.environment
    script = f'{place.shell} exec "$0" -m digenrl up "$1"'
    return subprocess.run(
        ["/bin/sh", "-c", script, sys.executable, place.recipe],
        cwd=folder, env=environment, text=True, encoding="utf-8", errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


def check(place: Surroundings, tmp_path: Path, model: Path) -> None:
    done = up(place, tmp_path, model)
    folder = tmp_path / place.folder
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout and "child_died" not in done.stdout, done.stdout
    run = folder / "runs/tiny"
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert list((run / "adapter").iterdir())
    assert not list((folder / "temporary").glob("*seaweed*")), "it leaves nothing outside the run"
    assert not list((folder / "temporary").glob("weed*"))
    assert "Skipping optional" not in (run / "logs/objects.log").read_text(), "its ports are open"


@pytest.mark.run
def test_a_run_works_in_the_worst_surroundings(tmp_path: Path, model: Path, writable: None) -> None:
    check(WORST, tmp_path, model)


@pytest.mark.run
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_works_in_each_of_the_reported_surroundings(
    case: str, tmp_path: Path, model: Path, writable: None
) -> None:
    check(CASES[case], tmp_path, model)
