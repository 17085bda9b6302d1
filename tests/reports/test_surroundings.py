"""Whole runs of two steps where people run them: odd folders, proxies, limits, no home.

The cases come from reports on other systems (a folder with a space, a company's proxy ...). One run
in the worst of all surroundings stands for them (tests/e2e/test_evaluation.py); `make test-all` has
each by itself.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import tiny_models
from tests.e2e.surroundings import NO_PROXY, PROXIES, WORDS, Surroundings, check_left, make_writable

PATIENCE_S = 500
RECIPE = """
[run]
name = "tiny"
steps = 2
[model]
folder = "a model"
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
LONG = f"{'a' * 100}/{'b' * 100}"
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
    yield
    make_writable(tmp_path)


@pytest.mark.run
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_works_in_each_of_the_reported_surroundings(
    case: str, tmp_path: Path, model: Path, writable: None
) -> None:
    place = CASES[case]
    folder = place.make(tmp_path)
    place.protect(shutil.copytree(model, folder / "a model"))
    (folder / "recipe.toml").write_text(RECIPE.format(prompts=place.prompts_file))
    done = subprocess.run(
        place.command("up", "recipe.toml"), cwd=folder, env=place.variables(folder), text=True,
        encoding="utf-8", errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "child_died" not in done.stdout, done.stdout
    run = folder / "runs/tiny"
    check_left(folder, run, done.stdout)
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
