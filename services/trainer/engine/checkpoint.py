"""Stored form of a version, and its restoration by a trainer, to the last bit.

A checkpoint holds ``<state>/<parameter>`` for each state of each parameter: the optimizer's
(``exp_avg``, ``exp_avg_sq``, ``step``), its moving ``average``, what it is in the ``old`` policy,
the float32 ``master`` of weights that are published in another type; and the random generator's
state. Every rank stores and reads only its own part of sharded tensors, so any number of ranks can
continue from any other.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import AdamW

from shared.diffusion.weights.master_weights import TrainedWeights
from shared.diffusion.weights.shards import TensorAssembly, local_part, read_part
from shared.diffusion.weights.weight_sets import WeightSets
from shared.errors import IntegrityError
from shared.run.manifest import FetchedObject, TensorBox

RNG = "rng"
AVERAGE = "average/"
MASTER = "master/"
OLD_POLICY_PREFIX = "old/"
STEP = "step"


def checkpoint_tensors(
    optimizer: AdamW,
    trained: TrainedWeights,
    averages: Mapping[str, Tensor],
    old: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return what a checkpoint holds, sharded where the parameters are; ``old``: the weights of the
    policy that generates, if that is another one."""
    states = {
        f"{state}/{name}": torch.as_tensor(value)
        for name, parameter in trained.parameters.items()
        for state, value in optimizer.state[parameter].items()
    }
    states |= {f"{AVERAGE}{name}": average for name, average in averages.items()}
    states |= {f"{OLD_POLICY_PREFIX}{name}": each for name, each in old.items()}
    states |= {f"{MASTER}{name}": master for name, master in trained.masters.items()}
    return {**states, RNG: torch.get_rng_state()}


class Restoration:
    """Puts a committed version in use, one object after the other."""

    def __init__(
        self,
        optimizer: AdamW,
        trained: TrainedWeights,
        averages: Mapping[str, Tensor],
        sets: WeightSets,
    ) -> None:
        self._optimizer, self._trained, self._averages = optimizer, trained, averages
        self._sets = sets
        self._following = {AVERAGE: averages, OLD_POLICY_PREFIX: sets.old}
        """Weights that follow the trained ones, by the beginning of their states' names."""
        self._parameters, self._masters = trained.parameters, trained.masters
        self._weights, self._states = TensorAssembly(), TensorAssembly()
        for name, master in self._masters.items():
            self._states.expect(f"{MASTER}{name}", master.detach())
        for name, tensor in trained.stored.items():
            self._weights.expect(name, tensor)
        self._moments: dict[str, Tensor] = {}
        """States of the optimizer, as far as they have come."""
        self._rng: Tensor | None = None

    def wants_weights(self, name: str, piece: TensorBox) -> bool:
        """Return whether it needs a piece of the weights: not of those that have masters."""
        return name not in self._parameters or self._weights.wants(name, piece)

    def wants_states(self, name: str, piece: TensorBox) -> bool:
        """Return whether it needs a piece of the checkpoint: what this rank holds of a parameter it
        holds of its states."""
        parameter = self._parameters.get(name.partition("/")[2])
        if parameter is None or not piece.whole:
            return True
        mine = local_part(parameter)[1]
        return mine.whole != piece.whole or mine.overlaps(piece)

    @torch.no_grad()
    def add_weights(self, part: FetchedObject) -> None:
        """Raises IntegrityError if the weights belong to another adapter."""
        for name, tensor, piece in read_part(part):
            if name in self._weights or name not in self._masters:
                self._weights.add(name, tensor, piece)

    @torch.no_grad()
    def add_states(self, part: FetchedObject) -> None:
        """Raises IntegrityError if the checkpoint belongs to another adapter."""
        for name, tensor, piece in read_part(part):
            if name == RNG:
                self._rng = tensor
            elif not self._is_skipped(name):
                if name not in self._states:
                    self._states.expect(name, self._target(name, tensor))
                self._states.add(name, tensor, piece)

    def _is_skipped(self, name: str) -> bool:
        """Return whether the state belongs to weights that this run does not have."""
        return any(
            name.startswith(parameter) and not own for parameter, own in self._following.items()
        )

    def _target(self, name: str, tensor: Tensor) -> Tensor:
        """Return where a state belongs; masters are expected from the beginning."""
        state, _, parameter_name = name.partition("/")
        parameter = self._parameters.get(parameter_name)
        if parameter is None or name.startswith(MASTER):
            raise IntegrityError(f"this checkpoint belongs to another adapter: {name[:80]}")
        for beginning, weights in self._following.items():
            if name.startswith(beginning):
                return weights[parameter_name]
        like = tensor if state == STEP else parameter.detach()
        self._moments[name] = torch.zeros_like(like, memory_format=torch.preserve_format)
        return self._moments[name]

    @torch.no_grad()
    def finish(self) -> None:
        """Put the states in use; averages and an old policy that the checkpoint lacks begin at the
        weights.

        Raises:
            IntegrityError: if something is missing.
        """
        self._weights.finish()
        self._states.finish()
        if self._rng is None:
            raise IntegrityError("this checkpoint has no random state")
        self._optimizer.state.clear()
        for name, value in self._moments.items():
            state, _, parameter_name = name.partition("/")
            self._optimizer.state[self._parameters[parameter_name]][state] = value
        for beginning, weights in self._following.items():
            for name, tensor in weights.items():
                if f"{beginning}{name}" not in self._states:
                    tensor.copy_(self._parameters[name])
        # Shards are written in place: whoever watches the parameters must see a new version.
        torch.autograd.graph.increment_version(list(self._parameters.values()))
        self._trained.settle()
        self._sets.compare_old()
        torch.set_rng_state(self._rng)
