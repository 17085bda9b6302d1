"""Optimizer and random state as tensors: what a resumed trainer needs to go on to the last bit."""

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from shared.errors import IntegrityError

RNG = "rng"


def checkpoint_tensors(optimizer: AdamW, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """``<state>/<parameter>`` for each state of each parameter, and the generator's state."""
    tensors = {
        f"{state}/{name}": torch.as_tensor(value).detach().clone()
        for name, parameter in parameters.items()
        for state, value in optimizer.state[parameter].items()
    }
    return {**tensors, RNG: torch.get_rng_state()}


def restore_checkpoint(
    optimizer: AdamW, parameters: dict[str, nn.Parameter], tensors: dict[str, Tensor]
) -> None:
    """Raises IntegrityError if the checkpoint belongs to other parameters."""
    states = {key: value for key, value in tensors.items() if key != RNG}
    unknown = {key.split("/", 1)[1] for key in states} - set(parameters)
    if unknown or RNG not in tensors:
        raise IntegrityError(f"this checkpoint belongs to another adapter: {sorted(unknown)[:1]}")
    optimizer.state.clear()
    for key, value in states.items():
        state, name = key.split("/", 1)
        parameter = parameters[name]
        device = "cpu" if state == "step" else parameter.device
        optimizer.state[parameter][state] = value.to(device, copy=True)
    torch.set_rng_state(tensors[RNG])
