"""The gradient of one group as an object: computed on one device, added up on another.

It carries the batch's denominator and the digest of the weights that it is the gradient of, so that
adding it is the same as training the group, to floating-point tolerance.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shared.devices.protocols import GroupData, GroupGradient
from shared.diffusion.policy import LoadedPolicy
from shared.diffusion.tensors import pack, unpack
from shared.diffusion.training.auto_chunks import AutoChunkedGradient, words_of
from shared.diffusion.training.rows import TrainingGroup, read_group
from shared.diffusion.training.sums import REST, of_which
from shared.diffusion.weights import trained_parameters
from shared.errors import ContractError, OutOfMemory
from shared.messages.workers import MemoryShortage
from shared.recipe.recipe import Recipe

WEIGHTS = "weights_digest"
"""Name of a (32,) uint8 tensor: the sha256 of the weights that the gradient belongs to."""


class GroupGradients:
    """Computes gradients, one group after the other, on a device that also generates."""

    def __init__(self, loaded: LoadedPolicy, recipe: Recipe) -> None:
        self._loaded = loaded
        self._recipe = recipe
        self._parameters = trained_parameters(loaded.model.transformer)
        self._chunked = AutoChunkedGradient(recipe, loaded)

    def compute(self, group: GroupData) -> GroupGradient:
        """Computes the gradient of a group at the weights in use; leaves none on the network.

        Raises:
            ContractError: if the fragments do not make up a group of this run, or its gradient is
                not finite.
            OutOfMemory: if it does not fit even in the smallest chunks.
        """
        read = read_group(self._recipe, group)
        if len(group.advantages) != self._recipe.batch.group_size:
            raise ContractError(f"{len(group.advantages)} samples are no whole group of this run")
        gradient, shortage = self._gradient(read)
        _check_finite(gradient)
        digest = bytes.fromhex(self._loaded.in_use.digest())
        gradient[WEIGHTS] = torch.tensor(list(digest), dtype=torch.uint8)
        return GroupGradient(
            gradient=pack(gradient),
            tally=self._chunked.transaction.tally.as_dict(),
            shortage=shortage,
        )

    def _gradient(self, group: TrainingGroup) -> tuple[dict[str, Tensor], MemoryShortage | None]:
        """Returns a gradient per parameter, of its shape, and what did not fit at first; tries
        smaller chunks until they fit."""
        before: MemoryShortage | None = None
        parameters = self._parameters
        while True:
            self._chunked.transaction.begin()
            try:
                shortage = self._chunked.accumulate(group) or before
                rest = self._chunked.transaction.rest.gradients
                found = {name: each.grad for name, each in parameters.items()}
                if self._recipe.sums_apart:
                    found |= {REST + name: rest.get(name) for name in parameters}
                whole = {n: _given(t, parameters[of_which(n)]) for n, t in found.items()}
                return whole, shortage
            except OutOfMemory as error:
                if not error.smaller:
                    raise
                before = MemoryShortage.of(error, f"passes of {words_of(self._chunked.chunk)}")
            finally:
                for parameter in self._parameters.values():
                    parameter.grad = None


def _given(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient


def read_gradient(
    part: GroupGradient,
    parameters: Mapping[str, nn.Parameter],
    weights_digest: str,
    *,
    apart: bool = False,
) -> dict[str, Tensor]:
    """Reads the gradient of each parameter, of its shape and on the CPU; with ``apart`` both of its
    sums (`training.sums`).

    Raises:
        ContractError: if it belongs to another adapter or to other weights, or is not finite.
    """
    tensors = unpack(part.gradient)
    stored = tensors.pop(WEIGHTS, None)
    if stored is None or (stored.shape, stored.dtype) != ((32,), torch.uint8):
        raise ContractError("a gradient does not name its weights")
    digest = bytes(stored.tolist()).hex()
    if digest != weights_digest:
        raise ContractError(
            f"a gradient of weights {digest[:12]} cannot be added at {weights_digest[:12]}"
        )
    names = [*parameters, *(REST + name for name in parameters if apart)]
    each = {name: parameters[of_which(name)] for name in names}
    wanted = {(name, tuple(p.shape), p.dtype) for name, p in each.items()}
    given = {(name, tuple(t.shape), t.dtype) for name, t in tensors.items()}
    if wanted != given:
        raise ContractError(f"a gradient of another adapter: {min(wanted ^ given, key=str)}")
    _check_finite(tensors)
    return tensors


@torch.no_grad()
def add_gradient(parameters: Mapping[str, nn.Parameter], gradient: Mapping[str, Tensor]) -> None:
    """Adds gradients, of their parameters' shapes and on any device, to the ``grad`` fields."""
    for name, tensor in gradient.items():
        parameter = parameters[name]
        here = tensor.to(parameter.device)
        parameter.grad = here.clone() if parameter.grad is None else parameter.grad.add_(here)


def _check_finite(gradient: Mapping[str, Tensor]) -> None:
    for name, tensor in gradient.items():
        if not bool(tensor.isfinite().all()):
            raise ContractError(f"the gradient of {name} is not finite")
