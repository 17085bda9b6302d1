"""Records what a network is given and what it returns, row by row, while somebody samples with it.

A pipeline and its adapter run networks of one class, so that their calls can be compared by the
names of its inputs: what differs first says what is wrong.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bench.family_check.inputs import called

STATE, TIME, GUIDANCE = "hidden_states", "timestep", "guidance"
"""Inputs of every network that diffusers has for these families."""
SOUND, SIGMA = "audio_hidden_states", "sigma"
"""Inputs of LTX-2's network besides."""
OTHER_NAMES = {"x": STATE, "t": TIME}
"""Other names for them; Z-Image's network has these."""


@dataclass(frozen=True, slots=True)
class Row:
    """Is one row of a network's batch in one call."""

    inputs: dict[str, Tensor]
    output: Tensor

    @property
    def texts(self) -> dict[str, Tensor]:
        """What comes from the prompt, or from places in the image, and neither from the state nor
        from the time."""
        own = (STATE, TIME, GUIDANCE, SOUND, SIGMA)
        return {name: each for name, each in self.inputs.items() if name not in own}

    def distance(self, other: "Row") -> float:
        """How far the texts of two rows are apart: the largest difference of a number."""
        mine, theirs = self.texts, other.texts
        if mine.keys() != theirs.keys():
            return float("inf")
        return max((apart(mine[name], theirs[name]) for name in mine), default=0.0)


@dataclass(slots=True)
class Calls:
    """Holds the rows of each denoising step."""

    steps: list[list[Row]] = field(default_factory=lambda: [[]])

    def next_step(self) -> None:
        self.steps.append([])

    @property
    def first(self) -> list[Row]:
        return self.steps[0]


def apart(one: Tensor, other: Tensor) -> float:
    """The largest difference of a number; infinite for other shapes."""
    if one.shape != other.shape:
        return float("inf")
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


@contextmanager
def recording(networks: list[nn.Module]) -> Iterator[Calls]:
    """Record all calls of these networks."""
    calls = Calls()
    with_hooks = [each.register_forward_hook(_hook(calls), with_kwargs=True) for each in networks]
    try:
        yield calls
    finally:
        for hook in with_hooks:
            hook.remove()


def _hook(calls: Calls) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        found = output[0] if isinstance(output, tuple) else output
        found = found if isinstance(found, Tensor | list) else found.sample
        calls.steps[-1] += _rows(bound, found)

    return hook


def _rows(bound: dict[str, Any], output: Tensor | list[Tensor]) -> Iterator[Row]:
    """Yield the rows of a call whose inputs are tensors with a row in each place of their first
    dimension, or lists with a tensor for each row."""
    given = {OTHER_NAMES.get(name, name): each for name, each in bound.items()}
    inputs_of_all = {name: each for name, each in given.items() if _is_compared(name, each)}
    state = inputs_of_all[STATE]
    for row in range(len(state)):
        inputs = {}
        for name, each in inputs_of_all.items():
            if isinstance(each, list):
                inputs[name] = each[row].detach()
                continue
            is_of_rows = each.ndim > 0 and len(each) == len(state) and not name.endswith("_ids")
            inputs[name] = (each[row] if is_of_rows else each).detach()
        yield Row(inputs, output[row].detach())


def _is_compared(name: str, value: object) -> bool:
    """Whether an input means something by itself: a mask that is the same everywhere hides nothing,
    and places as ``..._coords`` are those that the network counts itself if it is given none."""
    if name.endswith("_mask") and isinstance(value, Tensor):
        return bool((value != value.flatten()[0]).any())
    return not name.endswith("_coords") and _is_of_tensors(value)


def _is_of_tensors(value: object) -> bool:
    is_list = isinstance(value, list) and value and all(isinstance(one, Tensor) for one in value)
    return isinstance(value, Tensor) or bool(is_list)


def networks_of(pipeline: Any) -> list[nn.Module]:
    """The networks that a pipeline denoises with."""
    found = [getattr(pipeline, name, None) for name in ("transformer", "transformer_2")]
    return [each for each in found if isinstance(each, nn.Module)]


def has_own_pass(pipeline: Any) -> bool:
    """Whether an adapter has put a forward pass of its own in place of the network's, whose inputs
    are then not those that the pipeline gives."""
    return any("forward" in vars(each) for each in networks_of(pipeline))


@dataclass(frozen=True, slots=True)
class Sampled:
    """Is what a pipeline has done."""

    noise: Tensor
    """The noise that it has drawn, before it packs tokens: (1, ...)."""
    calls: Calls
    velocity: Tensor
    """What its scheduler was given in the first step, without the sound."""
    last: Tensor
    """What its scheduler has returned in the last step, without the sound."""
    result: Tensor
    """What it returns."""
    sigmas: tuple[float, ...]

    def picture(self, state: Tensor) -> Tensor:
        """Returns the part of an adapter's state or velocity (1, ...) that is no sound."""
        has_sound = SOUND in self.calls.first[0].inputs
        return state[..., : self.noise.shape[-1]] if has_sound else state


def sample(pipeline: Any, arguments: dict[str, Any]) -> Sampled:
    """Sample once with diffusers' own pipeline."""
    drawn: list[Tensor] = []
    given: list[Tensor] = []
    made: list[Tensor] = []
    scheduler = pipeline.scheduler
    steps: Any = next(cls for cls in type(scheduler).__mro__ if "step" in vars(cls))
    step = steps.step
    module = type(pipeline).prepare_latents.__globals__
    draw = module["randn_tensor"]

    def drawing(*args: Any, **kwargs: Any) -> Tensor:
        drawn.append(draw(*args, **kwargs))
        return drawn[-1].clone()

    with recording(networks_of(pipeline)) as calls:

        def stepping(self: Any, model_output: Tensor, *args: Any, **kwargs: Any) -> Any:
            found = step(self, model_output, *args, **kwargs)
            if self is scheduler:  # a copy of it steps the sound
                given.append(model_output.detach().clone())
                made.append(found[0].detach().clone())
                calls.next_step()
            return found

        module["randn_tensor"], steps.step = drawing, stepping
        try:
            result = called(pipeline, arguments, generator=torch.Generator().manual_seed(3))
        finally:
            module["randn_tensor"], steps.step = draw, step
    calls.steps.pop()
    found = torch.as_tensor(result.frames if hasattr(result, "frames") else result.images)
    sigmas = tuple(float(each) for each in scheduler.sigmas)
    return Sampled(drawn[0], calls, given[0], made[-1], found, sigmas)
