"""Compares what an adapter does in a step with what its pipeline does, and names what differs."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bench.family_check.inputs import Size, arguments, encoded
from bench.family_check.probe import (
    GUIDANCE,
    SIGMA,
    SOUND,
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
from bench.family_check.sound import joined
from shared.diffusion.families.base import Family

TOLERANCE = 2e-6
"""Largest difference of a state, relative to its largest number if that is above 1."""
PIXELS = 1e-5
ROUNDED = 2e-2
"""Difference, relative to the largest number, up to which it may be that of half precision."""
NARROW = (torch.bfloat16, torch.float16)


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
    noise = _noise(theirs)
    drawn = tuple(noise.shape[1:])
    if _without_ones(shape) != _without_ones(drawn):
        return Compared(f"latent shape: the spec says {shape}, and the pipeline draws {drawn}")
    start = noise.reshape(1, *shape)
    one = 1.0 if model.spec.forwards(guidance) == 2 else guidance
    plain = sample(pipeline, arguments(model, pipeline, one, size, "latent"))
    [my_prompt] = _taken(model, start, theirs.sigmas[:2], one, size)[0].first
    ours, velocity, latents = _taken(model, start, theirs.sigmas, guidance, size)
    found = _Found(theirs, ours, plain.calls.first[0], my_prompt, has_own_pass(model.pipeline))
    mistake = next(found.mistakes(velocity, guidance), None)
    if mistake is not None:
        return Compared(mistake)
    return _whole(model, pipeline, found, latents, arguments(model, pipeline, guidance, size, "pt"))


def _noise(theirs: Sampled) -> Tensor:
    """Return the whole state (1, ...) that a pipeline begins with, with the sound if it makes
    any."""
    sound = theirs.calls.first[0].inputs.get(SOUND)
    return theirs.noise if sound is None else joined(theirs.noise, sound)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(length for length in shape if length != 1)


def _taken(
    model: Family, start: Tensor, sigmas: tuple[float, ...], guidance: float, size: Size
) -> tuple[Calls, Tensor, Tensor]:
    """Take Euler steps with the adapter: its calls, its first velocity and its last latents."""
    conditions, latents, velocities = encoded(model, guidance, size), start, []
    with recording(networks_of(model.pipeline)) as calls, torch.no_grad():
        for now, then in pairwise(sigmas):
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
            difference = _states_apart(a[0], b[0])
            if difference > max(_tolerance(each) for each in _states(b[0])):
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
        yield from _of_state(my_prompt, their_prompt, self.theirs.noise)
        yield from _of_inputs(my_prompt, their_prompt)
        if my_empty is not None and their_empty is not None:
            yield from _of_texts("negative prompt", my_empty, their_empty)

    def _of_velocity(
        self, velocity: Tensor, guidance: float, prompt: Row, empty: Row | None
    ) -> Iterator[str]:
        mine, theirs = _sorted(self.theirs.picture(velocity)), _sorted(self.theirs.velocity)
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
            yield f"{'source image' if 'image' in name else what}: {name} {_how(a, b)}"


def _states(row: Row) -> list[Tensor]:
    return [row.inputs[name] for name in (STATE, SOUND) if name in row.inputs]


def _states_apart(mine: Row, theirs: Row) -> float:
    return max(apart(a, b) for a, b in zip(_states(mine), _states(theirs), strict=True))


def _of_state(mine: Row, theirs: Row, noise: Tensor) -> Iterator[str]:
    """Compare the states of the first step; ``noise`` is all that is not of a source image."""
    a, b = mine.inputs[STATE], theirs.inputs[STATE]
    if a.dtype != b.dtype:
        yield f"dtype: the network is given {a.dtype}, and {b.dtype} by the pipeline"
    if a.shape != b.shape:
        yield f"packing: the network's state {_how(a, b)}"
    if apart(a, b) <= _tolerance(b):
        if _states_apart(mine, theirs) > _tolerance(b):
            yield "packing: the network is given other tokens of the sound than by the pipeline"
        return
    is_noise = torch.isin(b, noise)
    of_noise = (a[is_noise], b[is_noise]) if is_noise.any() else (a, b)
    if apart(*of_noise) <= _tolerance(b):
        yield f"source image: what the network is given of it {_how(a, b)}"
    if apart(_sorted(a), _sorted(b)) <= _tolerance(b):
        yield "packing: the network is given the pipeline's numbers in another order"
    if _is_rounded(*of_noise):
        yield f"dtype: latents are rounded on their way to the network, by {apart(a, b):.1g}"
    yield f"latents: what the network is given {_how(a, b)}"


def _of_inputs(mine: Row, theirs: Row) -> Iterator[str]:
    """Compare time and guidance, then places."""
    names = {
        TIME: "sigma rule: the network's time",
        SIGMA: "sigma rule: the network's sigma",
        GUIDANCE: "guidance: the network's guidance",
    }
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
    prompt, empty = (_leading(each, len(mine)) for each in (prompt, empty))
    swapped = prompt + guidance * (empty - prompt)
    rescaled = swapped * empty.norm(dim=-1, keepdim=True) / swapped.norm(dim=-1, keepdim=True)
    for each in map(_sorted, (swapped, rescaled)):
        if apart(mine, each) <= _tolerance(each):
            yield "CFG order: the empty prompt's velocity is taken for the prompt's"
    spread = float((prompt - empty).double().sum())
    if spread:
        strength = (float(mine.double().sum()) - float(empty.double().sum())) / spread
        other = _sorted(empty + strength * (prompt - empty))
        if apart(mine, other) <= 1e-3 * float(other.abs().max()):
            yield f"guidance: is {strength:.3g} in the adapter, where the pipeline has {guidance:g}"


def _leading(output: Tensor, count: int) -> Tensor:
    """Return so many of the first numbers of an output (tokens, C), which those of a source image's
    tokens follow."""
    return output if output.numel() <= count else output[: count // output.shape[-1]]


def _whole(
    model: Family, pipeline: Any, found: _Found, latents: Tensor, call: dict[str, Any]
) -> Compared:
    """Compare states of all steps, and the pixels in the end."""
    pairs = zip(found.ours.steps, found.theirs.calls.steps, strict=True)
    error = max(_states_apart(a[0], b[0]) for a, b in pairs)
    last = _sorted(found.theirs.picture(latents)), _sorted(found.theirs.last)
    error = max(error, apart(*last))
    pixels = sample(pipeline, call).result
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
