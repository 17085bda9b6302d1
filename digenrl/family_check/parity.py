"""Compares what an adapter does in a step with what its pipeline does, and names what differs."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from digenrl.family_check.probe import (
    GUIDANCE,
    STATE,
    TIME,
    Calls,
    Row,
    Sampled,
    apart,
    has_own_pass,
    networks_of,
    recording,
    sample,
)
from shared.diffusion.families.base import Family

PROMPT = "a handwritten five"
TOLERANCE = 2e-6
"""Largest difference of a state, relative to its largest number if that is above 1."""
PIXELS = 1e-5
ROUNDED = 2e-2
"""Difference, relative to the largest number, up to which it may be that of half precision."""
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Size:
    height: int
    width: int
    frames: int
    steps: int = 3


@dataclass(frozen=True, slots=True)
class Compared:
    mistake: str | None
    """The first thing that differs, in one line; what follows from it is not looked at."""
    error: float = 0.0
    """Largest difference of a state after all steps."""


def compare(model: Family, pipeline: Any, guidance: float, size: Size) -> Compared:
    """Sample with both, from one noise, and say what differs first."""
    theirs = sample(pipeline, arguments(model, pipeline, guidance, size, "latent"))
    shape = model.latent_shape(height=size.height, width=size.width, frames=size.frames)
    drawn = tuple(theirs.noise.shape[1:])
    if _without_ones(shape) != _without_ones(drawn):
        return Compared(f"latent shape: the spec says {shape}, and the pipeline draws {drawn}")
    start = theirs.noise.reshape(1, *shape)
    one = 1.0 if model.spec.forwards(guidance) == 2 else guidance
    plain = sample(pipeline, arguments(model, pipeline, one, size, "latent"))
    [my_prompt] = _taken(model, start, theirs.sigmas, one, steps=1)[0].first
    ours, velocity, latents = _taken(model, start, theirs.sigmas, guidance, steps=size.steps)
    found = _Found(theirs, ours, plain.calls.first[0], my_prompt, has_own_pass(model.pipeline))
    mistake = next(found.mistakes(velocity, guidance), None)
    if mistake is not None:
        return Compared(mistake)
    return _whole(model, pipeline, found, latents, arguments(model, pipeline, guidance, size, "pt"))


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
    if spec.makes_videos:
        call["num_frames"] = size.frames
    if "max_sequence_length" in inspect.signature(type(pipeline).__call__).parameters:
        own = getattr(pipeline, spec.text_tokenizer, None) if spec.text_tokenizer else None
        limit = own.model_max_length if own is not None else model.text_tokens
        call["max_sequence_length"] = min(model.text_tokens, limit)
    return call


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(length for length in shape if length != 1)


def _taken(
    model: Family, start: Tensor, sigmas: tuple[float, ...], guidance: float, *, steps: int
) -> tuple[Calls, Tensor, Tensor]:
    """Take Euler steps with the adapter: its calls, its first velocity and its last latents."""
    conditions, latents, velocities = model.encode(PROMPT, guidance=guidance), start, []
    with recording(networks_of(model.pipeline)) as calls, torch.no_grad():
        for now, then in list(pairwise(sigmas))[:steps]:
            sigma = torch.tensor([now], dtype=torch.float32)
            velocities.append(model.velocity(latents, sigma, conditions, guidance=guidance))
            latents = latents + (then - now) * velocities[-1]
            calls.next_step()
    calls.steps.pop()
    return calls, velocities[0], latents


@dataclass(frozen=True, slots=True)
class _Found:
    theirs: Sampled
    ours: Calls
    their_prompt: Row
    my_prompt: Row
    """Rows of the prompt alone, without classifier-free guidance."""
    own_pass: bool
    """Whether inputs of the two networks have other meanings; then results alone are compared."""

    def mistakes(self, velocity: Tensor, guidance: float) -> Iterator[str]:
        their_prompt, their_empty = _told_apart(self.theirs.calls.first, self.their_prompt)
        if not self.own_pass:
            yield from self._of_calls()
        yield from self._of_velocity(velocity, guidance, their_prompt, their_empty)
        for number, (a, b) in enumerate(zip(self.ours.steps, self.theirs.calls.steps, strict=True)):
            difference = apart(a[0].inputs[STATE], b[0].inputs[STATE])
            if difference > _tolerance(b[0].inputs[STATE]):
                yield (
                    f"packing: after {number} steps the network's tokens differ by "
                    f"{difference:.1g}, though velocities are the same numbers: they come back in "
                    "another order"
                )

    def _of_calls(self) -> Iterator[str]:
        mine, theirs = self.ours.first, self.theirs.calls.first
        if len(mine) != len(theirs):
            yield (
                f"guidance: the adapter runs {len(mine)} rows of the network per sample, and the "
                f"pipeline {len(theirs)}"
            )
        my_prompt, my_empty = _told_apart(mine, self.my_prompt)
        their_prompt, their_empty = _told_apart(theirs, self.their_prompt)
        yield from _of_texts("prompt", self.my_prompt, self.their_prompt)
        yield from _of_state(my_prompt, their_prompt)
        yield from _of_inputs(my_prompt, their_prompt)
        if my_empty is not None and their_empty is not None:
            yield from _of_texts("negative prompt", my_empty, their_empty)

    def _of_velocity(
        self, velocity: Tensor, guidance: float, prompt: Row, empty: Row | None
    ) -> Iterator[str]:
        mine, theirs = _sorted(velocity), _sorted(self.theirs.velocity)
        if mine.shape != theirs.shape:
            yield f"latent shape: velocities have {len(mine)} numbers, not {len(theirs)}"
        difference, most = apart(mine, theirs), float(theirs.abs().max())
        if difference <= _tolerance(theirs):
            if velocity.dtype != torch.float32:
                yield f"dtype: velocities are {velocity.dtype}, and float32 is what is trained"
            return
        if empty is not None:
            yield from _of_guidance(mine, guidance, prompt.output, empty.output)
        if difference <= ROUNDED * most:
            yield f"dtype: velocities differ by {difference:.1g}, as those of half precision do"
        yield f"velocity: differs by {difference:.1g} from what the pipeline's scheduler is given"


def _told_apart(rows: list[Row], prompt: Row) -> tuple[Row, Row | None]:
    """Return the row of the prompt, and that of the empty one if there is one."""
    first = min(range(len(rows)), key=lambda number: rows[number].distance(prompt))
    others = [row for number, row in enumerate(rows) if number != first]
    return rows[first], others[0] if others else None


def _of_texts(what: str, mine: Row, theirs: Row) -> Iterator[str]:
    missing = sorted(mine.texts.keys() ^ theirs.texts.keys())
    if missing:
        by = "the adapter" if missing[0] in mine.texts else "the pipeline"
        yield f"{what}: {missing[0]} is given to the network by {by} alone"
    for name in mine.texts.keys() & theirs.texts.keys():
        if name.endswith("_ids"):
            continue
        a, b = mine.texts[name], theirs.texts[name]
        if apart(a, b) > _tolerance(b):
            yield f"{what}: {name} {_how(a, b)}"


def _of_state(mine: Row, theirs: Row) -> Iterator[str]:
    a, b = mine.inputs[STATE], theirs.inputs[STATE]
    if a.dtype != b.dtype:
        yield f"dtype: the network is given {a.dtype}, and {b.dtype} by the pipeline"
    if a.shape != b.shape:
        yield f"packing: the network's state {_how(a, b)}"
    if apart(a, b) <= _tolerance(b):
        return
    if apart(_sorted(a), _sorted(b)) <= _tolerance(b):
        yield "packing: the network is given the pipeline's numbers in another order"
    if _is_rounded(a, b):
        yield f"dtype: latents are rounded on their way to the network, by {apart(a, b):.1g}"
    yield f"latents: what the network is given {_how(a, b)}"


def _of_inputs(mine: Row, theirs: Row) -> Iterator[str]:
    """Compare time and guidance, then places."""
    names = {TIME: "sigma rule: the network's time", GUIDANCE: "guidance: the network's guidance"}
    for name, what in names.items():
        a, b = mine.inputs.get(name), theirs.inputs.get(name)
        if (a is None) != (b is None):
            yield f"{what} is given by {'the adapter' if b is None else 'the pipeline'} alone"
        if a is None or b is None:
            continue
        if apart(a.flatten(), b.flatten()) > _tolerance(b):
            kind = f"dtype: {name}" if _is_rounded(a.flatten(), b.flatten()) else what
            yield f"{kind} is {a.flatten()[0]:g}, and {b.flatten()[0]:g} in the pipeline"
    yield from _of_places(mine, theirs)


def _of_places(mine: Row, theirs: Row) -> Iterator[str]:
    for name, b in theirs.inputs.items():
        if not name.endswith("_ids"):
            continue
        a = mine.inputs.get(name, b)
        if b.ndim == a.ndim + 1 and b.shape[0] == 1:
            a = a[None]  # networks that take places per row take the places of all rows as well
        if apart(a, b) > 0:
            yield f"packing: {name}, the places of tokens, {_how(a, b)}"


def _of_guidance(mine: Tensor, guidance: float, prompt: Tensor, empty: Tensor) -> Iterator[str]:
    """Name the mistake, if the velocity is another sum of the rows of prompt and empty prompt."""
    swapped = _sorted(prompt + guidance * (empty - prompt))
    if apart(mine, swapped) <= _tolerance(swapped):
        yield "CFG order: the empty prompt's velocity is taken for the prompt's"
    spread = float((prompt - empty).double().sum())
    if spread:
        strength = (float(mine.double().sum()) - float(empty.double().sum())) / spread
        other = _sorted(empty + strength * (prompt - empty))
        if apart(mine, other) <= 1e-3 * float(other.abs().max()):
            yield f"guidance: is {strength:.3g} in the adapter, where the pipeline has {guidance:g}"


def _whole(
    model: Family, pipeline: Any, found: _Found, latents: Tensor, call: dict[str, Any]
) -> Compared:
    """Compare states of all steps, and the pixels in the end."""
    pairs = zip(found.ours.steps, found.theirs.calls.steps, strict=True)
    error = max(apart(a[0].inputs[STATE], b[0].inputs[STATE]) for a, b in pairs)
    if latents.shape == found.theirs.latents.shape:
        error = max(error, apart(latents, found.theirs.latents))
    pixels = sample(pipeline, call).latents
    difference = apart(model.decode(latents), pixels)
    if difference > PIXELS:
        return Compared(f"decoder: pixels differ by {difference:.1g} from the pipeline's")
    return Compared(None, error)


def _sorted(values: Tensor) -> Tensor:
    return values.detach().float().flatten().sort().values


def _tolerance(values: Tensor) -> float:
    return TOLERANCE * max(1.0, float(values.abs().max()) if values.numel() else 0.0)


def _is_rounded(mine: Tensor, theirs: Tensor) -> bool:
    return any(apart(mine, theirs.to(dtype).to(theirs.dtype)) == 0 for dtype in NARROW)


def _how(mine: Tensor, theirs: Tensor) -> str:
    if mine.shape != theirs.shape:
        return f"has the shape {tuple(mine.shape)}, and {tuple(theirs.shape)} in the pipeline"
    return f"differs by {apart(mine, theirs):.1g} from the pipeline's"
