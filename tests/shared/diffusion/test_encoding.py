"""Every process that encodes prompts encodes one before it is ready, without packages that no extra
installs; an error of a library is a reason, not the end of a process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.rollout.encoder_engine import EncoderEngine
from services.rollout.rollout_engine import RolloutEngine
from shared.diffusion.loading.models import load_model
from shared.diffusion.sampling.encoding import encoded
from shared.errors import ContractError, UserError
from shared.recipe.recipe import Recipe, load_recipe, override
from tests import tiny_models
from tests.paths import DIGITS


def changed(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def recipe_of(folder: Path) -> Recipe:
    size = {"model.height": 32, "model.width": 32, "model.guidance": 1.0}
    return override(load_recipe(DIGITS), {"model.folder": folder, **size})


@pytest.mark.parametrize("engine", [EncoderEngine, RolloutEngine])
def test_a_process_whose_encoder_encodes_no_prompt_is_never_ready(
    engine: type, tmp_path: Path
) -> None:
    folder = tiny_models.save("flux2-klein", tmp_path)
    (folder / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=rf"^model\.folder: {folder}: .*chat template.* again$"):
        engine(recipe_of(folder))


def test_an_error_of_a_library_is_the_reason_for_which_a_prompt_cannot_be_encoded() -> None:
    recipe = load_recipe(DIGITS)
    model: Any = load_model(
        recipe.model.folder, {"text"}, device=torch.device("cpu"), dtype=torch.float32
    )
    for error in (ImportError("no such package"), AttributeError("'NoneType'"), KeyError("x")):
        model.encode_prompt = lambda *args, error=error, **given: (_ for _ in ()).throw(error)
        with pytest.raises(ContractError, match=rf"cannot be encoded: {type(error).__name__}"):
            encoded(model, recipe, "seven")
    model.encode_prompt = lambda *args, **given: (_ for _ in ()).throw(RuntimeError("CUDA error"))
    with pytest.raises(RuntimeError, match="CUDA"):
        encoded(model, recipe, "seven")


def test_flux2_encodes_prompts_without_torchvision(tmp_path: Path) -> None:
    """The published folder names PixtralProcessor as its tokenizer, which needs torchvision."""
    folder = tiny_models.save("flux2", tmp_path)
    cpu, kind = torch.device("cpu"), torch.float32
    wanted = load_model(folder, {"text"}, device=cpu, dtype=kind).encode("a cat", guidance=3.5)
    changed(folder / "model_index.json", tokenizer=["transformers", "PixtralProcessor"])
    changed(folder / "tokenizer/tokenizer_config.json", processor_class="PixtralProcessor")
    signs = {f"image{each}_token": f"[IMG{each.upper()}]" for each in ("", "_break", "_end")}
    (folder / "tokenizer/processor_config.json").write_text(
        json.dumps({"processor_class": "PixtralProcessor", "patch_size": 14, **signs})
    )
    found = load_model(folder, {"text"}, device=cpu, dtype=kind).encode("a cat", guidance=3.5)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
