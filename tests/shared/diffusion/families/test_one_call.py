"""Both halves of guidance in one call, where their texts have different lengths."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shared.diffusion.families import qwen_image
from shared.diffusion.loading.compilation import compile_blocks
from shared.diffusion.loading.models import repeat_rows
from shared.diffusion.loading.recomputation import checkpoint_blocks
from shared.diffusion.weights.trained_weights import trained_parameters
from tests import tiny_models
from tests.shared.diffusion.ratio_error import load_moved
from tests.shared.diffusion.test_blocks import NO_LEAVES, OLD_WORDS

ROWS, GUIDANCE = 3, 4.0
SIGMAS = torch.tensor([0.9, 0.4, 0.2])
NAMES = ("qwen-image", "qwen-image-edit")


@pytest.fixture(scope="module", params=tiny_models.but_slow(NAMES[:1], NAMES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(family, tmp_path_factory.mktemp(family))


def velocity(
    family: str, model: Any, rows: slice = slice(ROWS), size: int = 32, told: Any = None
) -> Tensor:
    shape = model.latent_shape(height=size, width=size)
    latents = torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(0))[rows]
    told = told or tiny_models.encoded(family, model, GUIDANCE, size)
    found: Tensor = model.velocity(
        latents, SIGMAS[rows], repeat_rows(told, len(latents)), guidance=GUIDANCE
    )
    return found


def gradient(family: str, model: Any) -> Tensor:
    """The velocities, and after them the gradient of every trained weight."""
    model.transformer.zero_grad(set_to_none=True)
    found = velocity(family, model)
    found.square().sum().backward()
    trained = trained_parameters(model.transformer).values()
    gradients = [each.grad.flatten() for each in trained if each.grad is not None]
    return torch.cat([found.detach().flatten(), *gradients])


def in_two_calls(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(qwen_image, "MAX_PADDING", 0.0)
        return gradient(family, load_moved(folder, "lora", torch.float32))


@pytest.mark.parametrize(
    "checkpointed", [None, True, pytest.param("selective", marks=pytest.mark.slow)]
)
def test_one_call_gives_what_two_give(
    family: str, folder: Path, checkpointed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_moved(folder, "lora", torch.float32)
    if checkpointed:
        checkpoint_blocks(model.transformer, checkpointed)
    wanted = in_two_calls(family, folder, monkeypatch)
    torch.testing.assert_close(gradient(family, model), wanted, rtol=1e-5, atol=5e-6)


@OLD_WORDS
@NO_LEAVES
@pytest.mark.slow
def test_one_compiled_call_gives_what_two_give(
    family: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    model = load_moved(folder, "lora", torch.float32)
    blocks = compile_blocks(model.transformer, backend="aot_eager")
    wanted = in_two_calls(family, folder, monkeypatch)
    torch.testing.assert_close(gradient(family, model), wanted, rtol=1e-4, atol=5e-6)
    assert blocks.reason is None


def test_attention_of_neither_half_has_a_mask_or_sees_padding(
    family: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_moved(folder, "lora", torch.float32)
    original, seen = functional.scaled_dot_product_attention, []

    def attend(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
        seen.append((len(query), query.shape[2] - key.shape[2], named.get("attn_mask")))
        return original(query, key, value, **named)

    told = tiny_models.encoded(family, model, GUIDANCE, 32)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend)
    with torch.no_grad():
        velocity(family, model, told=told)
    padding = told["text"].shape[1] - told["negative_text"].shape[1]
    assert padding > 0 and seen[:2] == [(ROWS, padding, None), (ROWS, 0, None)]
    assert len(seen) == 2 * model.transformer.config.num_layers  # type: ignore[union-attr,operator]


def test_a_sample_is_the_same_whatever_other_rows_there_are(family: str, folder: Path) -> None:
    model = load_moved(folder, "lora", torch.float32)
    with torch.no_grad():
        together = velocity(family, model)
        alone = [velocity(family, model, slice(row, row + 1)) for row in range(ROWS)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)


def test_padding_that_costs_more_than_a_call_is_left_out(
    family: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qwen_image, "MAX_PADDING", 1 / 40)
    model = load_moved(folder, "lora", torch.float32)
    rows: list[int] = []
    model.transformer.register_forward_hook(lambda _, __, found: rows.append(len(found[0])))
    with torch.no_grad():
        velocity(family, model, size=32)
        velocity(family, model, size=256)
    assert rows == [ROWS, ROWS, 2 * ROWS]
