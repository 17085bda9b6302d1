"""`python -m bench check-family` passes our families, and names planted mistakes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.family_check.check import check_model
from shared.diffusion.families.base import NEGATIVE
from shared.diffusion.families.flux import Flux, FluxKontext
from shared.diffusion.families.ltx2 import LTX2
from shared.diffusion.families.qwen_image import QwenImageEdit
from shared.diffusion.families.sd3 import StableDiffusion3
from shared.diffusion.families.wan import IMAGE_EMBEDDING, WanFromImage
from shared.diffusion.loading.models import Conditions
from shared.models.catalogue import find_family
from shared.models.families import FAMILIES
from tests import tiny_models


class ChannelsInnermost(Flux):
    """Packs the four latents of a token before their channels."""

    def run(self, latents: Tensor, *given: Any, **more: Any) -> Tensor:
        rows, tokens, channels = latents.shape
        other = latents.reshape(rows, tokens, channels // 4, 4).transpose(2, 3)
        velocity = super().run(other.reshape(latents.shape), *given, **more)
        return velocity.reshape(rows, tokens, 4, channels // 4).transpose(2, 3).flatten(2)


class Swapped(StableDiffusion3):
    def guided(
        self, unconditional: Tensor, conditional: Tensor, guidance: float | Tensor
    ) -> Tensor:
        return super().guided(conditional, unconditional, guidance)


class Rounded(StableDiffusion3):
    def forward(self, latents: Tensor, *given: Any) -> Tensor:
        return super().forward(latents.to(torch.bfloat16), *given)


class HalfVelocity(StableDiffusion3):
    def velocity(self, *given: Any, **more: Any) -> Tensor:
        return super().velocity(*given, **more).to(torch.float16)


class WithoutGradient(StableDiffusion3):
    def forward(self, *given: Any) -> Tensor:
        with torch.no_grad():
            return super().forward(*given)


class EmptyIsZero(StableDiffusion3):
    def encode_prompt(self, prompt: str, *, negative: str | None) -> Conditions:
        found = super().encode_prompt(prompt, negative=negative)
        zero = {name: torch.zeros_like(found[name]) for name in found if name.startswith(NEGATIVE)}
        return {**found, **zero}


class InThousands(Flux):
    def forward(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, guidance: float
    ) -> Tensor:
        return super().forward(latents, sigma, conditions, guidance * 1000)


class OneLess(StableDiffusion3):
    def strength(self, guidance: float, sigma: Tensor, like: Tensor) -> float | Tensor:
        return guidance - 1


class OtherOrder(FluxKontext):
    """Packs rows and columns of the four latents of a token the other way round."""

    def velocities(self, tokens: Tensor, *given: Any) -> Tensor:
        return _transposed(super().velocities(_transposed(tokens), *given))


def _transposed(tokens: Tensor) -> Tensor:
    rows, count, channels = tokens.shape
    return tokens.reshape(rows, count, channels // 4, 2, 2).transpose(3, 4).flatten(2)


class DarkerSource(FluxKontext):
    def encode_edit(self, prompt: str, image: Tensor, **more: Any) -> Conditions:
        return super().encode_edit(prompt, image // 2, **more)


class BlindToTheSource(WanFromImage):
    def encode_edit(self, prompt: str, image: Tensor, **more: Any) -> Conditions:
        found = super().encode_edit(prompt, image, **more)
        return found | {IMAGE_EMBEDDING: torch.zeros_like(found[IMAGE_EMBEDDING])}


class SwappedEdit(QwenImageEdit):
    def guided(
        self, unconditional: Tensor, conditional: Tensor, guidance: float | Tensor
    ) -> Tensor:
        return super().guided(conditional, unconditional, guidance)


class RoundedEdit(WanFromImage):
    def forward(self, latents: Tensor, *given: Any) -> Tensor:
        return super().forward(latents.to(torch.bfloat16).float(), *given)


class EditWithoutGradient(WanFromImage):
    def forward(self, *given: Any) -> Tensor:
        with torch.no_grad():
            return super().forward(*given)


class EmptyEditIsZero(QwenImageEdit):
    def encode_edit(self, *given: Any, **more: Any) -> Conditions:
        found = super().encode_edit(*given, **more)
        zero = {name: torch.zeros_like(found[name]) for name in found if name.startswith(NEGATIVE)}
        return {**found, **zero}


class OneLessOfAnEdit(WanFromImage):
    def strength(self, guidance: float, sigma: Tensor, like: Tensor) -> float | Tensor:
        return guidance - 1


class OtherSound(LTX2):
    """Has the sound's tokens in another order than the pipeline."""

    def _parts(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        video, sound, left = super()._parts(latents)
        return video, sound.flip(-1), left


@dataclass(frozen=True)
class Plant:
    family: str
    said: str
    changes: Callable[[], dict[str, Any]]


def by(adapter: type) -> Callable[[], dict[str, Any]]:
    return lambda: {"adapter": f"{__name__}:{adapter.__name__}"}


def unshifted(config: object, steps: int, tokens: object) -> tuple[float, ...]:
    return (*(1 - step / steps for step in range(steps)), 0.0)


PLANTS = {
    "sigma rule": Plant("sd3", "sigma rule: it gives 1.0000, ", lambda: {"sigmas": unshifted}),
    "packing": Plant(
        "flux", "packing: the network is given the pipeline's numbers in another order",
        by(ChannelsInnermost),
    ),
    "CFG order": Plant("sd3", "CFG order: the empty prompt's velocity is taken", by(Swapped)),
    "dtype": Plant("sd3", "dtype: latents are rounded on their way to the network", by(Rounded)),
    "dtype of velocities": Plant("sd3", "dtype: velocities", by(HalfVelocity)),
    "missing gradient": Plant(
        "sd3", "missing gradient: 14 of 14 adapted layers have none", by(WithoutGradient)
    ),
    "latent shape": Plant(
        "sd3", "latent shape: the spec says (16, ", lambda: {"decoder_factor": lambda _: 4}
    ),
    "negative prompt": Plant("sd3", "negative prompt: ", by(EmptyIsZero)),
    "guidance": Plant("flux", "guidance: the network's guidance is 3500, and 3.5", by(InThousands)),
    "guidance of two halves": Plant(
        "sd3", "guidance: is 3 in the adapter, where the pipeline has 4", by(OneLess)
    ),
    "source image": Plant("flux-kontext", "source image: what the network", by(DarkerSource)),
    "source image that is seen": Plant(
        "wan-i2v", "source image: encoder_hidden_states_image differs", by(BlindToTheSource)
    ),
    "sigma rule of an edit": Plant(
        "flux-kontext", "sigma rule: it gives 1.0000, ", lambda: {"sigmas": unshifted}
    ),
    "packing of an edit": Plant(
        "flux-kontext", "packing: the network is given the pipeline's numbers in another order",
        by(OtherOrder),
    ),
    "CFG order of an edit": Plant(
        "qwen-image-edit", "CFG order: the empty prompt's velocity is taken", by(SwappedEdit)
    ),
    "dtype of an edit": Plant("wan-i2v", "dtype: latents are rounded", by(RoundedEdit)),
    "missing gradient of an edit": Plant("wan-i2v", "missing gradient: ", by(EditWithoutGradient)),
    "latent shape of an edit": Plant(
        "flux-kontext", "latent shape: the spec says ", lambda: {"decoder_factor": lambda _: 4}
    ),
    "negative prompt of an edit": Plant(
        "qwen-image-edit", "negative prompt: ", by(EmptyEditIsZero)
    ),
    "guidance of an edit": Plant(
        "wan-i2v", "guidance: is 3 in the adapter, where the pipeline has 4", by(OneLessOfAnEdit)
    ),
    "packing of sound": Plant("ltx2", "packing: the network is given other tokens", by(OtherSound)),
}  # fmt: skip
QUICK = ("CFG order",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in PLANTS]
)
def test_a_planted_mistake_is_named_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = PLANTS[name]
    folder = tiny_models.save(plant.family, tmp_path)
    spec = find_family(folder)
    monkeypatch.setitem(FAMILIES, spec.pipeline, replace(spec, **plant.changes()))
    [mistake] = check_model(spec.pipeline, folder).mistakes
    assert mistake.startswith(plant.said) and "\n" not in mistake


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny_models.MODELS)
def test_nothing_is_wrong_with_our_own_families(family: str, tmp_path: Path) -> None:
    folder = tiny_models.save(family, tmp_path)
    spec = find_family(folder)
    report = check_model(spec.pipeline, folder)
    assert not report.mistakes
    assert report.figures["ratio of a replay, largest distance from 1"] <= 1e-6
    states = [value for name, value in report.figures.items() if name.startswith("states")]
    assert max(states) <= 2e-6 * 4
    assert report.figures["adapted layers with a gradient"] > 5
