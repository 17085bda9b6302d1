"""Packs optimizer, averages and random state as tensors: what a trainer needs to resume to the last
bit."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from shared.diffusion.masters import TrainedWeights
from shared.diffusion.weights import full_tensor, shard_like
from shared.errors import IntegrityError

RNG = "rng"
AVERAGE = "average"
MASTER = "master"


def checkpoint_tensors(
    optimizer: AdamW, trained: TrainedWeights, averages: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return ``<state>/<parameter>`` for each state of each parameter, with masters of weights that
    are published in half precision, and the generator's state.

    The tensors are full, however many ranks share them, so that any number of ranks goes on from
    them.
    """
    states = {
        f"{state}/{name}": torch.as_tensor(value)
        for name, parameter in trained.parameters.items()
        for state, value in optimizer.state[parameter].items()
    }
    states |= {f"{AVERAGE}/{name}": average for name, average in averages.items()}
    states |= {f"{MASTER}/{name}": master for name, master in trained.masters.items()}
    # Sorted: every rank has to ask for the same one at the same time.
    tensors = {k: full_tensor(states[k].detach()).to("cpu", copy=True) for k in sorted(states)}
    return {**tensors, RNG: torch.get_rng_state()}


@torch.no_grad()
def restore_checkpoint(
    optimizer: AdamW,
    parameters: Mapping[str, nn.Parameter],
    averages: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
) -> None:
    """Put a checkpoint in use; it overwrites as many of ``averages`` as it has.

    Raises:
        IntegrityError: if the checkpoint belongs to other parameters.
    """
    states = {
        key: value for key, value in tensors.items() if key != RNG and key.split("/")[0] != MASTER
    }
    unknown = {key.split("/", 1)[1] for key in states} - set(parameters)
    if unknown or RNG not in tensors:
        raise IntegrityError(f"this checkpoint belongs to another adapter: {sorted(unknown)[:1]}")
    optimizer.state.clear()
    for key, value in states.items():
        state, name = key.split("/", 1)
        parameter = parameters[name]
        here = value if state == "step" else shard_like(parameter, value)
        if state != AVERAGE:
            optimizer.state[parameter][state] = here.clone()
        elif name in averages:
            averages[name].copy_(here)
    torch.set_rng_state(tensors[RNG])


def averaged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's averages by the parameters' names; empty if it has none."""
    return _of_kind(AVERAGE, tensors)


def masters_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's masters by the parameters' names; empty if it has none."""
    return _of_kind(MASTER, tensors)


def _of_kind(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = f"{kind}/"
    return {n.removeprefix(prefix): each for n, each in tensors.items() if n.startswith(prefix)}
