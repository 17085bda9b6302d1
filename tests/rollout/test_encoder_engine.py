"""What an encoder makes is what a device that generates would have made itself, to the last bit."""

import asyncio
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from services.rollout.encoder_engine import EncoderEngine
from services.rollout.rollout_engine import RolloutEngine
from shared.devices.protocols import GeneratedFragment
from shared.diffusion.loading.device import held_bytes
from shared.diffusion.sampling.tensors import pack, unpack
from shared.errors import FaultyConditions
from shared.messages.contracts import Policy, Prompt
from shared.models.memory import weight_bytes
from shared.recipe.recipe import Recipe, load_recipe, override
from tests import examples, tiny_models
from tests.paths import DIGITS

OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in tiny_models.OTHERS]
MIB = 1 << 20


def recipe_of(family: str, folder: Path, **changes: object) -> Recipe:
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return override(load_recipe(DIGITS), {
        "model.folder": folder, "model.height": 32, "model.width": 32,
        "model.frames": 5 if family in tiny_models.VIDEO else 1,
        "model.guidance": 4.0 if family in tiny_models.CFG else 3.5,
        "sampling.steps": 4, "sampling.window": 2, "sampling.first_window_starts": (0, 0), **given,
    })  # fmt: skip


def source_of(family: str) -> bytes | None:
    """The file of the image that a prompt edits."""
    if family not in tiny_models.EDITS:
        return None
    file = io.BytesIO()
    tiny_models.picture(32, 32).save(file, "PNG")
    return file.getvalue()


def made(
    engine: RolloutEngine, conditions: bytes | None, source: bytes | None = None
) -> GeneratedFragment:
    policy = Policy(version=0, weights_digest=engine.weights_digest())
    task = examples.task(policy=policy, prompt=Prompt(text=tiny_models.PROMPT))

    async def work() -> GeneratedFragment:
        generation = await engine.begin(task, conditions, source)
        while not generation.done:
            await generation.advance()
        return await generation.finish()

    return asyncio.run(work())


def encoded(recipe: Recipe, source: bytes | None = None) -> bytes:
    return asyncio.run(EncoderEngine(recipe).conditions(tiny_models.PROMPT, source))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", [*tiny_models.FAMILIES, *OTHERS])
def test_a_device_without_text_encoders_makes_the_same_samples(
    family: str, dtype: str, tmp_path: Path
) -> None:
    folder = tiny_models.save(family, tmp_path)
    plain = recipe_of(family, folder, model__dtype=dtype)
    whole, bare = RolloutEngine(plain), RolloutEngine(override(plain, {"encoder.workers": 1}))
    network: Any = bare._generator._model
    assert network.pipeline.text_encoder is None and network.pipeline.vae is not None
    source = source_of(family)
    conditions = encoded(plain, source)
    assert conditions == asyncio.run(whole.conditions(tiny_models.PROMPT, source))
    expected, found = made(whole, None, source), made(bare, conditions)
    assert (found.trajectory, found.media) == (expected.trajectory, expected.media)
    assert made(whole, conditions).trajectory == expected.trajectory


def test_a_model_whose_third_encoder_is_left_out_is_encoded_alike(tmp_path: Path) -> None:
    pipeline = tiny_models.build("sd3")
    pipeline.register_modules(text_encoder_3=None, tokenizer_3=None)
    pipeline.save_pretrained(tmp_path)
    recipe = recipe_of("sd3", tmp_path)
    whole = RolloutEngine(recipe)
    assert encoded(recipe) == asyncio.run(whole.conditions(tiny_models.PROMPT))


def test_conditions_that_are_none_or_of_another_model_are_faulty_and_harm_nobody(
    tmp_path: Path,
) -> None:
    recipe = recipe_of("sd3", tiny_models.save("sd3", tmp_path), encoder__workers=1)
    bare, conditions = RolloutEngine(recipe), encoded(recipe)
    tensors = unpack(conditions)
    narrow = {name: tensor[..., :-1] for name, tensor in tensors.items()}
    renamed = {f"other_{name}": tensor for name, tensor in tensors.items()}
    infinite = {name: tensor * torch.inf for name, tensor in tensors.items()}
    for faulty in (b"no tensors", conditions[:-1], *map(pack, (narrow, renamed, infinite))):
        with pytest.raises(FaultyConditions):
            made(bare, faulty)
    assert made(bare, conditions).trajectory == made(bare, conditions).trajectory


def test_a_device_registers_what_it_holds_without_the_text(tmp_path: Path) -> None:
    recipe = recipe_of("sd3", tiny_models.save("sd3", tmp_path))
    elsewhere = override(recipe, {"encoder.workers": 2})
    text = weight_bytes(tmp_path, "float32", {"text"})
    assert held_bytes(recipe, {"text"}, trains=False) == text > 0

    def held(of: Recipe) -> int:
        return held_bytes(of, of.generating_parts, trains=False)

    assert held(recipe) - held(elsewhere) == text


RESIDENT = """
import sys
from pathlib import Path
import psutil
from services.rollout.rollout_engine import RolloutEngine
from shared.recipe.recipe import load_recipe
from tests.rollout.test_encoder_engine import made
engine = RolloutEngine(load_recipe(Path(sys.argv[1])))
made(engine, Path(sys.argv[2]).read_bytes() if len(sys.argv) > 2 else None)
sys.stdout.write(str(psutil.Process().memory_info().rss))
"""
"""Generates a fragment, from conditions if there are any, and prints the resident bytes."""


@pytest.mark.slow
def test_a_rollout_process_without_text_encoders_is_smaller_by_their_size(tmp_path: Path) -> None:
    from transformers import T5Config, T5EncoderModel

    pipeline = tiny_models.build("sd3")
    small = pipeline.text_encoder_3.config
    config = T5Config(**{**small.to_dict(), "d_ff": 1 << 18, "num_layers": 4})
    pipeline.register_modules(text_encoder_3=T5EncoderModel(config))
    pipeline.save_pretrained(tmp_path / "model")
    recipe = recipe_of("sd3", tmp_path / "model")
    text = weight_bytes(tmp_path / "model", "float32", {"text"})
    assert text > 300 * MIB

    conditions = tmp_path / "conditions"
    conditions.write_bytes(encoded(recipe))

    def resident(workers: int, *given: Path) -> int:
        path = tmp_path / f"{workers}.json"
        path.write_text(override(recipe, {"encoder.workers": workers}).model_dump_json())
        program = [sys.executable, "-c", RESIDENT, str(path), *map(str, given)]
        said = subprocess.run(program, capture_output=True, check=True).stdout
        return int(said.splitlines()[-1])  # after what is logged

    saved = resident(0) - resident(1, conditions)
    sys.stdout.write(f"text {text / MIB:.0f} MiB, saved {saved / MIB:.0f} MiB\n")
    assert 0.95 * text < saved < 1.3 * text
