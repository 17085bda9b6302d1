"""What a pipeline and its adapter are both given: a prompt, a size, and a source image where one is
edited."""

import ast
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shared.diffusion.families.base import Family
from shared.diffusion.families.latents import as_picture
from shared.diffusion.loading.models import Conditions

PROMPT = "a handwritten five"
MOST_TOKENS = 1024
"""Longest text that a pipeline is asked for; longer ones are refused, whatever an image adds."""


@dataclass(frozen=True, slots=True)
class Size:
    height: int
    width: int
    frames: int
    steps: int = 3


def encoded(model: Family, guidance: float, size: Size) -> Conditions:
    """Encode the prompt with the adapter, and the source image if the family edits one."""
    image = source_image(size) if model.spec.takes_image else None
    return model.encode(PROMPT, guidance=guidance, image=image, frames=size.frames)


def source_image(size: Size) -> Tensor:
    """Return random pixels (1, 3, H, W), uint8, of the size of a sample."""
    generator = torch.Generator().manual_seed(4)
    shape = (1, 3, size.height, size.width)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def arguments(
    model: Family, pipeline: Any, guidance: float, size: Size, output: str
) -> dict[str, Any]:
    """Return the arguments of the pipeline's call; a guider is given its guidance."""
    spec = model.spec
    if "guider" in pipeline.components:
        pipeline.guider = pipeline.guider.new(guidance_scale=guidance)
    given = {
        name: ast.literal_eval(value) if isinstance(value, str) else value
        for name, value in spec.guidance_arguments(guidance).items()
    }
    call = {
        "prompt": PROMPT, "height": size.height, "width": size.width,
        "num_inference_steps": size.steps, "output_type": output, **given,
    }  # fmt: skip
    known = inspect.signature(type(pipeline).__call__).parameters
    if spec.makes_videos:
        call["num_frames"] = size.frames
    if "max_sequence_length" in known:
        own = getattr(pipeline, spec.text_tokenizer, None) if spec.text_tokenizer else None
        limit = own.model_max_length if own is not None else model.text_tokens
        call["max_sequence_length"] = min(model.text_tokens, limit, MOST_TOKENS)
    if spec.takes_image:
        as_it_is = {"max_area": size.height * size.width, "_auto_resize": False}
        call |= {name: value for name, value in as_it_is.items() if name in known}
        call["image"] = as_picture(source_image(size))
    return call


def called(pipeline: Any, call: dict[str, Any], **more: Any) -> Any:
    """Call the pipeline, which leaves the source image at its size."""
    with _unscaled(pipeline, call["height"], call["width"]), torch.no_grad():
        return pipeline(**call, **more)


@contextmanager
def _unscaled(pipeline: Any, height: int, width: int) -> Iterator[None]:
    """Put what leaves images and prompts as they are in place of what would scale an image to the
    size that the real model was trained at, and of the package ftfy where it is missing: it changes
    no prompt of plain letters, and some pipelines call it without asking whether it is there."""
    changes: dict[str, Any] = {"calculate_dimensions": lambda area, ratio: (width, height, None)}
    modules = {cls.__module__: vars(sys.modules[cls.__module__]) for cls in type(pipeline).__mro__}
    kept = [
        (module, name, module[name])
        for module in modules.values()
        for name in changes
        if name in module
    ]
    without = [each for each in modules.values() if "basic_clean" in each and "ftfy" not in each]
    for module, name, _ in kept:
        module[name] = changes[name]
    for module in without:
        module["ftfy"] = SimpleNamespace(fix_text=lambda text: text)
    try:
        yield
    finally:
        for module, name, own in kept:
            module[name] = own
        for module in without:
            del module["ftfy"]
