"""`digenrl fetch` with a recipe makes the folders of its scorers, from a mirror of the hub."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from bench.digits.text import clip_tokenizer
from digenrl.commands.cli import app
from digenrl.hub.reward_weights import REWARDS
from services.reward.kinds import KINDS
from services.reward.scorer import build_scorers, scorer_kind
from shared.errors import UserError
from shared.recipe.recipe import load_recipe
from tests.hub.mirror import Mirror, in_use
from tests.paths import DIGITS
from tests.reward.published import OpenClip
from tests.reward.tiny_scorers import images, metadata, save_clip, shaken

CLIP_L, CLIP_H, HPS = (
    "openai/clip-vit-large-patch14", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "xswu/HPSv2",
)  # fmt: skip
WEIGHTS = "HPS_v2.1_compressed.pt"
SCORERS = """
[[reward.scorers]]
name = "hps"
type = "hpsv2"
folder = "models/hpsv2"
[[reward.scorers]]
name = "judge"
type = "judge"
url = "http://127.0.0.1:8123/v1"
judge = { model = "Qwen/Qwen3-VL-8B-Instruct" }
[[reward.scorers]]
name = "own"
type = "remote"
url = "http://127.0.0.1:8100"
[[evaluation.scorers]]
name = "fit"
type = "clip-score"
folder = "models/clip"
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 12)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    clip = save_clip(tmp_path / "clip", act="gelu")
    (clip / "README.md").write_text("# CLIP")
    (clip / "pytorch_model.bin").write_bytes(b"pickle")
    network: Any = shaken(OpenClip(len(clip_tokenizer(77))), seed=3)
    torch.save({"state_dict": network.state_dict()}, tmp_path / WEIGHTS)
    with in_use(tmp_path / "home", monkeypatch) as found:
        found.add(CLIP_L, clip)
        found.add(CLIP_H, clip)
        hps = tmp_path / "hps"
        hps.mkdir()
        shutil.move(tmp_path / WEIGHTS, hps)
        (hps / "HPS_v2_compressed.pt").write_bytes(b"another")
        found.add(HPS, hps)
        yield found


def fetched(path: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["fetch", str(path), *words])


def test_the_networks_of_a_recipe_are_fetched_and_made(hub: Mirror, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'base = "{DIGITS}"\n{SCORERS}')
    tables = load_recipe(recipe)
    with pytest.raises(
        UserError, match=r"scorers\.hps\.folder: no folder .*hpsv2; `digenrl fetch`"
    ):
        scorer_kind(tables.reward.scorers[0])
    hub.breaks[WEIGHTS] = 3 * (1 << 12) + 5
    done = fetched(recipe)
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == [str(tmp_path / "models" / name) for name in ("hpsv2", "clip")]
    for line in (
        "reward.scorers.judge: asks http://127.0.0.1:8123/v1; start its server, such as: "
        "vllm serve Qwen/Qwen3-VL-8B-Instruct --port 8123",
        "reward.scorers.own: asks http://127.0.0.1:8100; start its server, such as: "
        "digenrl serve-scorer TYPE --port 8100",
    ):
        assert line in done.stderr
    names = hub.fetched()
    assert names.count(WEIGHTS) == 2, "what was broken off goes on"
    assert {"README.md", "pytorch_model.bin", "HPS_v2_compressed.pt"}.isdisjoint(names)
    assert names.count("model.safetensors") == 1, "the base of HPSv2 is fetched without weights"
    for scorers in (tables.reward.scorers[:1], tables.evaluation.scorers):
        [built] = build_scorers(scorers)
        assert len(built.score(images(2), metadata(2))) == 2
    clip = tmp_path / "models" / "clip"
    clip.unlink()
    clip.symlink_to(tmp_path / "removed")
    assert fetched(recipe).exit_code == 0
    assert hub.fetched() == names, "what is here is not fetched again"
    assert (clip / "model.safetensors").is_file(), "a link to what was removed is made again"


def test_what_comes_damaged_makes_no_folder(hub: Mirror, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'base = "{DIGITS}"\n{SCORERS}')
    hub.damaged.add(WEIGHTS)
    done = fetched(recipe)
    assert done.exit_code != 0
    assert isinstance(done.exception, UserError) and "came damaged" in str(done.exception)
    del hub.repositories[HPS].files[WEIGHTS]
    done = fetched(recipe)
    assert str(done.exception).startswith("reward.scorers.hps.folder: ")
    assert f"xswu/HPSv2 has no {WEIGHTS} any more" in str(done.exception)
    assert not (tmp_path / "models" / "hpsv2").exists()


def test_every_network_can_be_had() -> None:
    networks = {name for name, kind in KINDS.items() if kind.extra == "reward-models"}
    found = {name: kind.hub for name, kind in KINDS.items() if kind.hub is not None}
    assert found.keys() == networks
    converted = {name for name, (_, weights) in found.items() if weights}
    assert {name for name in converted if not name.startswith("video-align-")} == REWARDS.keys()
