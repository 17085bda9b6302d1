"""A package that brings a family and scorers: listed, checked, named in a recipe, trained."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.cli import bench
from digenrl.commands.cli import app
from services.reward.scorer import build_scorers, check_packages, scorer_kind
from shared.errors import UserError
from shared.models import plugins
from shared.recipe.rewards import ScorerTable
from tests.paths import ROOT

PACKAGE = ROOT / "tests" / "packages" / "orchid"


def dist_info(folder: Path, entry_points: str) -> None:
    """What an installer writes beside a package."""
    info = folder / "digenrl_orchid-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: digenrl-orchid\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entry_points)


def forget() -> None:
    plugins.brought.cache_clear()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package on the path, with one that is broken and one whose name is ours."""
    dist_info(
        tmp_path,
        "[digenrl.families]\nOrchidPipeline = digenrl_orchid.family:ORCHID\n"
        "IrisPipeline = digenrl_orchid.family:ORCHID\n"
        "[digenrl.tiny_models]\nOrchidPipeline = digenrl_orchid.tiny:save\n"
        "[digenrl.scorers]\nink = digenrl_orchid.scorers:Ink\n"
        "ink-above = digenrl_orchid.scorers:INK_ABOVE\nbroken = digenrl_orchid.missing:X\n"
        "ocr = digenrl_orchid.scorers:Ink\nnumber = digenrl_orchid.scorers:Metadata\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(PACKAGE))
    forget()
    yield tmp_path
    forget()


def test_its_scorers_are_used_like_ours(installed: Path) -> None:
    tables = [
        ScorerTable(name="a", type="ink"),
        ScorerTable(name="b", type="ink-above", folder=installed),
    ]
    with pytest.raises(UserError, match=r"scorers\.b\.folder: .* has no threshold\.txt"):
        scorer_kind(tables[1])
    (installed / "threshold.txt").write_text("0.25")
    for table in tables:
        check_packages(table)
    images = np.full((1, 3, 4, 4), 255, np.uint8)
    assert [scorer.score(images, [{}]) for scorer in build_scorers(tables)] == [[1.0], [0.75]]
    for type, said in {
        "broken": "broken of digenrl-orchid 1.2 cannot be imported: ModuleNotFoundError",
        "number": "which is neither a Kind nor a class with a method score",
        "nobody": "known are: .*ink, ink-above",
    }.items():
        with pytest.raises(UserError, match=rf"^reward\.scorers\.x\.type: .*{said}"):
            scorer_kind(ScorerTable(name="x", type=type))


def test_lists_say_what_is_here_and_from_where(installed: Path) -> None:
    listed = json.loads(CliRunner().invoke(app, ["rewards", "--json"]).stdout)
    notes = {(each["name"], each["package"]): each["note"] for each in listed}
    assert notes["ink", "digenrl-orchid 1.2"] == "scores images"
    assert notes["ink-above", "digenrl-orchid 1.2"] == "needs folder, scores images"
    assert "cannot be imported" in notes["broken", "digenrl-orchid 1.2"]
    assert notes["ocr", "digenrl-orchid 1.2"] == "not used: the name is one of ours"
    assert notes["ocr", "digenrl"] == "scores images"
    shown = CliRunner().invoke(app, ["families"]).stdout.splitlines()
    assert any(line.split()[:3] == ["OrchidPipeline", "digenrl-orchid", "1.2"] for line in shown)
    assert any(
        "IrisPipeline" in line and "is no FamilySpec of IrisPipeline" in line for line in shown
    )


@pytest.mark.slow
def test_its_family_is_checked_by_its_name_alone(installed: Path) -> None:
    found = CliRunner().invoke(bench, ["check-family", "OrchidPipeline", "--json"])
    report = json.loads(found.stdout[found.stdout.index("{\n") :])
    assert report["mistakes"] == [] and found.exit_code == 0
    assert report["figures"]["states at guidance 3.5, largest difference"] <= 2e-6


RECIPE = """
[run]
name = "orchid"
steps = 2
[model]
folder = "model"
device = "cpu"
height = 32
width = 32
guidance = 3.5
[data]
prompts = "prompts.txt"
[sampling]
steps = 4
window = 2
sigmas = "model"
[batch]
groups = 2
group_size = 4
[trainer]
learning_rate = 1e-4
[rollout]
workers = 1
[[reward.scorers]]
name = "ink"
type = "ink"
"""


@pytest.mark.run
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_that_is_installed_trains(tmp_path: Path) -> None:
    site = tmp_path / "site"
    source = shutil.copytree(PACKAGE, tmp_path / "source")  # a build leaves files behind
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
         "--no-index", "--disable-pip-version-check", "--target", str(site), str(source)],
        check=True, timeout=300,
    )  # fmt: skip
    there = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "digenrl", *words], cwd=ROOT, env=there,
            capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "digenrl-orchid 1.2" in run("families") and "ink-above" in run("rewards")
    save = (
        "import sys, pathlib; from digenrl_orchid.tiny import save; save(pathlib.Path(sys.argv[1]))"
    )
    model = tmp_path / "model"
    subprocess.run([sys.executable, "-c", save, str(model)], cwd=ROOT, env=there, check=True)
    (tmp_path / "prompts.txt").write_text("a five\na six\n")
    recipe = tmp_path / "orchid.toml"
    recipe.write_text(RECIPE)
    run("check", str(recipe))
    run("up", str(recipe), "--runs", str(tmp_path / "runs"))
    summary = json.loads((tmp_path / "runs" / "orchid" / "summary.json").read_text())
    assert summary["steps"] == 2
