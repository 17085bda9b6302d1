"""A folder that is not as a scorer needs it is one line that names the recipe's key."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.reward.scorer import scorer_kind
from services.reward.scorers.aesthetic import HEAD
from shared.errors import UserError
from shared.recipe.rewards import ScorerTable
from tests.reward.tiny_scorers import WIDTH, head, images, save_clip, scorer

Break = Callable[[Path], object]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "clip")


def lacks_a_weight(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors["visual_projection.weight"]
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def is_of_another_width(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["projection_dim"] = WIDTH + 1
    (folder / "config.json").write_text(json.dumps(config))


def has_only_a_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def has_no_tokenizer(folder: Path) -> None:
    for path in (*folder.glob("tokenizer*"), *folder.glob("vocab*"), *folder.glob("merges*")):
        path.unlink()


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda folder: shutil.rmtree(folder), "no folder "),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json; docs/rewards.md"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot load "),
        (lambda folder: (folder / WEIGHTS).unlink(), "cannot load "),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"\0" * 64), "cannot load "),
        (has_only_a_pickle, "cannot load "),
        (lacks_a_weight, "holds no weights visual_projection.weight; is it another network's?"),
        (is_of_another_width, "cannot load "),
        (has_no_tokenizer, "has no tokenizer"),
        (lambda folder: (folder / "preprocessor_config.json").unlink(), "cannot load "),
    ],
)
def test_a_broken_folder(break_it: Break, said: str, folder: Path) -> None:
    break_it(folder)
    with pytest.raises(UserError) as raised:
        scorer("clip-score", folder)
    line = str(raised.value)
    assert line.startswith("reward.scorers.x.folder: ") and said in line
    assert "\n" not in line and str(folder) in line and len(line) < 500


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "has no weight or no bias"),
        ({"layers.0.weight": torch.zeros(1, WIDTH)}, "has no weight or no bias"),
        ({"conv.weight": torch.zeros(1)}, "conv.weight in "),
        ({"weight": torch.zeros(1, WIDTH + 1), "bias": torch.zeros(1)}, "cannot load "),
        ({"weight": torch.zeros(2, WIDTH), "bias": torch.zeros(2)}, "ends in 2 numbers"),
    ],
)
def test_a_head_that_does_not_fit(
    tensors: dict[str, torch.Tensor], said: str, folder: Path
) -> None:
    save_file(tensors, folder / HEAD)
    with pytest.raises(UserError, match=r"reward\.scorers\.x\.folder: ") as raised:
        scorer("aesthetic", folder)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def test_a_head_of_one_layer_needs_no_number(folder: Path) -> None:
    layer = torch.nn.Linear(WIDTH, 1)
    save_file(dict(layer.state_dict()), folder / HEAD)
    bare = scorer("aesthetic", folder).score(images(2), [{}] * 2)
    save_file(
        {f"layers.0.{name}": value for name, value in layer.state_dict().items()}, folder / HEAD
    )
    assert scorer("aesthetic", folder).score(images(2), [{}] * 2) == bare


@pytest.mark.parametrize(
    ("kind", "file"), [("aesthetic", HEAD), ("image-reward", WEIGHTS), ("hpsv2", "config.json")]
)
def test_a_missing_file_is_found_before_anything_is_loaded(
    kind: str, file: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / file).unlink(missing_ok=True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=rf"reward\.scorers\.x\.folder: .* has no {file}"):
        scorer_kind(ScorerTable(name="x", type=kind, folder=folder))
    with pytest.raises(UserError, match=r"reward\.scorers\.x\.folder: .*needs the folder"):
        scorer_kind(ScorerTable(name="x", type=kind))


@pytest.mark.parametrize("kind", ["aesthetic", "clip-score", "hpsv2", "pick-score"])
def test_what_is_not_installed_is_named_by_its_extra(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {f"layers.{key}": value for key, value in head(WIDTH, 0).state_dict().items()}
    save_file(layers, folder / HEAD)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        UserError, match=rf'reward\.scorers\.x\.type: {kind} needs the extra "reward-models"; '
    ):
        scorer(kind, folder)
