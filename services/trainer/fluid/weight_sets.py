"""The sets of trained weights that a member holds beside one another, where it steps while it
generates.

    before    the version before, with which fragments go on that were begun early
    newest    what is trained, and generates otherwise
    ahead     what the step makes of it beside, until `take`: then newest becomes before;
              between two updates of a batch, what the next one trains

They change places by exchanging pointers, between two pieces of work and by whoever holds the
device; gradients stay with the parameters. What a step or a copy reads is a set by its name,
whichever the network uses at that time.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from shared.diffusion.weights import WeightsInUse


class WeightSets:
    def __init__(self, in_use: WeightsInUse, parameters: Mapping[str, nn.Parameter]) -> None:
        """``parameters``: the trained weights of the network, by exported name."""
        self._in_use = in_use
        self._parameters = parameters
        self._newest: Mapping[str, Tensor] = {}
        self._before: Mapping[str, Tensor] = {}
        self._ahead: Mapping[str, Tensor] = {}
        self.settle()

    @property
    def newest(self) -> Mapping[str, Tensor]:
        """The newest weights, in use or not yet."""
        return self._ahead or self._newest

    def newest_digest(self) -> str:
        return self._in_use.digest_of(self.newest, None)

    def copy_of_newest(self) -> dict[str, nn.Parameter]:
        """Copy the weights that the next step goes from."""
        return {name: nn.Parameter(each.detach().clone()) for name, each in self.newest.items()}

    def make(self, ahead: Mapping[str, nn.Parameter]) -> None:
        """Keep what a step has made, to be taken."""
        self._ahead = {name: each.data for name, each in ahead.items()}

    def take(self) -> None:
        """Use what was made; what it was made of lies beside from here on."""
        self._before, self._newest, self._ahead = self._newest, self._ahead, {}
        self._point(self._newest)
        # Memory is used again by the allocator: whoever watches must see a new version.
        torch.autograd.graph.increment_version(list(self._parameters.values()))

    def before(self) -> AbstractContextManager[None]:
        """Have the network use the set before meanwhile, without gradients."""
        return self._using(self._before)

    def ahead(self) -> AbstractContextManager[None]:
        """Have the network use meanwhile what steps have made beside, if anything."""
        return self._using(self._ahead or self._newest)

    @contextmanager
    def _using(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        self._point(tensors)
        try:
            yield
        finally:
            self._point(self._newest)

    def forget(self) -> None:
        """Hold only the newest set that was taken, in the network."""
        self._before, self._ahead = {}, {}
        self._point(self._newest)

    def settle(self) -> None:
        """Note what the network holds as the newest set."""
        self._newest = {name: each.data for name, each in self._parameters.items()}

    def _point(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._parameters[name].data = tensor
