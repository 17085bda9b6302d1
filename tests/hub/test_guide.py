"""The commands of the guide run as they are written, against a mirror of the hub on this machine:
with a small model of the family, and sizes for a CPU behind each command."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny_models
from tests.hub.mirror import TOKEN, mirror
from tests.paths import RECIPES, ROOT

pytestmark = [pytest.mark.run, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "black-forest-labs/FLUX.1-dev"
SMALL = (
    "--model.dtype float32 --model.height 64 --model.width 64 --batch.groups 2 "
    "--batch.group_size 4 --run.steps 2 --rollout.workers 1 --trainer.devices 1 "
    "--reward.workers 1 --evaluation.samples_per_prompt 1 --model.device cpu"
)
OF_RECIPES = ("check", "up", "recipe")


def written() -> list[list[str]]:
    section = (ROOT / "docs" / "guide.md").read_text().split("\n## ")[1]
    block = re.split(r"^```.*$", section, flags=re.MULTILINE)[1]
    return [shlex.split(line)[1:] for line in block.splitlines() if line.startswith("digenrl ")]


def typed(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    small = SMALL.split() if words[0] in OF_RECIPES else []
    ended = subprocess.run(
        [sys.executable, "-m", "digenrl", *words, *small], cwd=folder, capture_output=True,
        text=True, env={**os.environ, **environment}, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}"
    return ended.stdout


def test_the_commands_of_the_guide_run(tmp_path: Path) -> None:
    commands = written()
    assert [words[0] for words in commands] == ["fetch", "recipe", "check", "up", "push"]
    (tmp_path / "recipes").symlink_to(RECIPES)
    (tmp_path / "my-prompts.txt").write_text('A sign that says "HELLO"\nA sign that says "OPEN"\n')
    model = tiny_models.save("flux", tmp_path / "made")
    with mirror() as hub:
        hub.add(MODEL, model)
        hub.repositories[MODEL].gated = True
        environment = {
            "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        said = {words[0]: typed(words, tmp_path, environment) for words in commands}
        pushed = hub.repositories["me/flux1-dev-mine"].files
    run = tmp_path / "runs" / "mine"
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    stored = json.loads((run / "recipe.json").read_text())
    assert stored["model"]["id"] == MODEL
    assert Path(stored["model"]["folder"]).name == stored["model"]["revision"]
    assert stored["data"]["prompts"] == str(tmp_path / "my-prompts.txt")
    assert "model.folder" in json.loads((run / "files.json").read_text())
    options = json.loads((run / "started.json").read_text())["options"]
    assert options["trainer.learning_rate"] == 1e-4
    assert f"{'data.prompts':<10}" in said["recipe"]
    assert f"`{MODEL}`" in pushed["README.md"].decode()
    assert any(name.endswith(".safetensors") for name in pushed)
