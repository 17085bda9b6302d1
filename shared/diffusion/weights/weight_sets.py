"""The sets of trained weights that a device holds of one network.

    in use      the version that is trained; the network holds it
    old         the policy that samples, where that is not the one that is trained
    reference   reference of KL and DPO; it never changes, and for all weights it is on the host
    start       start of the batch's first update, around which later updates are clipped
    ahead       result of updates to the version in use, which is unchanged until `take`
    before      sampler of the version before; fragments that it began are finished with it

The network computes with another set by exchanging pointers: nothing is copied, and gradients stay
with the parameters. Only the holder of the device may do that. A step or a copy reads a set by its
name, whichever set the network uses at that time. `TrainedSets` (`shared.models.memory`) counts the
sets.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shared.diffusion.loading.host_memory import host_memory
from shared.diffusion.weights.streaming import HostBlocks
from shared.diffusion.weights.trained_weights import trained_parameters

Tensors = Mapping[str, Tensor]
"""Weights by exported name, of the parameters' shapes, on their device."""


@dataclass(frozen=True, slots=True)
class VersionSets:
    """The sets of one version."""

    trained: Tensors
    sampling: Tensors
    """The same tensors, if the sampling weights are the trained ones."""

    @property
    def are_distinct(self) -> bool:
        return self.sampling is not self.trained


class WeightSets:
    def __init__(self, network: nn.Module) -> None:
        self._network, self._parameters = network, trained_parameters(network)
        self.old: dict[str, Tensor] = {}
        """Empty unless the run keeps an old policy."""
        self.old_differs = False
        """Whether the old policy's weights differ from the version in use."""
        self.reference: Tensors | HostBlocks = {}
        self.start: dict[str, Tensor] = {}
        self._in_use: Tensors = {}
        """Noted by `settle`."""
        self._ahead: Tensors = {}
        self._old_ahead: dict[str, Tensor] = {}
        """The old policy of the version that is made."""
        self._old_ahead_differs = False
        self._before: Tensors = {}
        self._samples_before = False

    @property
    def newest(self) -> VersionSets:
        """The newest version, in use or not yet."""
        trained = self._ahead or self._in_use
        differs = self._old_ahead_differs if self._old_ahead else self.training_differs
        return VersionSets(trained, self.newest_old if differs else trained)

    @property
    def newest_old(self) -> Tensors:
        """The old policy of the newest version; empty if the run keeps none."""
        return self._old_ahead or self.old

    def copies(self, tensors: Tensors) -> dict[str, Tensor]:
        """Copy weights to the network's device, where they stay as they are."""
        return {
            name: tensors[name].detach().to(each.device, copy=True)
            for name, each in self._parameters.items()
        }

    def keep_reference(self, *, on_host: bool) -> None:
        """Keep what the network holds as what it is compared with."""
        if not on_host:
            self.reference = self.copies(self._parameters)
            return
        device = next(iter(self._parameters.values())).device
        self.reference = HostBlocks(self._network, host_memory(device))
        for name, each in self._parameters.items():
            self.reference.store(name, each.detach().clone())

    # The old policy.

    def keep_old(self) -> None:
        """Begin an old policy at the weights of the network."""
        self.old = self.copies(self._parameters)
        self.old_differs = False

    def forget_old(self) -> None:
        self.old, self.old_differs = {}, False

    def follow(self, decay: float) -> None:
        """Move the old policy towards what the network holds."""
        self._follow(self.old, self._parameters, decay)
        self._changed(old_differs=decay > 0)

    @staticmethod
    @torch.no_grad()
    def _follow(old: Tensors, trained: Tensors, decay: float) -> None:
        """Move weights in place: decay x these + (1 - decay) x those that are trained."""
        for name, tensor in old.items():
            if decay:
                tensor.mul_(decay).add_(trained[name], alpha=1 - decay)
            else:
                tensor.copy_(trained[name])

    @torch.no_grad()
    def compare_old(self) -> None:
        """Look whether the old policy, which was written in place, differs from the network."""
        same = (torch.equal(each, self._parameters[n]) for n, each in self.old.items())
        self._changed(old_differs=not all(same))

    def _changed(self, *, old_differs: bool) -> None:
        self.old_differs = old_differs
        self._note_change()

    def _note_change(self) -> None:
        """Have observers of the parameters see a new version: weights were written in place, or
        memory is used again by the allocator."""
        torch.autograd.graph.increment_version(list(self._parameters.values()))

    # What the network uses.

    @property
    def training_differs(self) -> bool:
        """Whether the network is trained at other weights than those that sampled."""
        return self.old_differs or bool(self.old and self._ahead)

    def sampling(self) -> AbstractContextManager[None]:
        """Have the network use what samples, without gradients."""
        if self._samples_before:
            return self.using(self._before)
        return self.using(self.old) if self.old_differs else nullcontext()

    @contextmanager
    def before(self) -> Iterator[None]:
        """Have the version before be what samples meanwhile."""
        self._samples_before = True
        try:
            yield
        finally:
            self._samples_before = False

    def training(self) -> AbstractContextManager[None]:
        """Have the network use what the next update begins from, with gradients."""
        return self.using(self._ahead) if self._ahead else nullcontext()

    def comparing(self) -> AbstractContextManager[None]:
        """Have the network use the reference, without gradients."""
        if isinstance(self.reference, HostBlocks):
            return self.reference.used()
        return self.using(self.reference)

    @contextmanager
    def using(self, tensors: Tensors) -> Iterator[None]:
        data = {name: each.data for name, each in self._parameters.items()}
        self._point(tensors)
        try:
            yield
        finally:
            self._point(data)

    def _point(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            self._parameters[name].data = tensor

    # One step ahead.

    def make(self, ahead: Tensors, old_decay: float | None) -> None:
        """Keep what an update has made, until `take`.

        Args:
            old_decay: how the old policy follows, if the update makes a version that has one.
        """
        self._ahead = ahead
        if old_decay is not None:
            self._old_ahead = {name: each.clone() for name, each in self.old.items()}
            self._follow(self._old_ahead, ahead, old_decay)
            self._old_ahead_differs = old_decay > 0

    def take(self) -> None:
        """Use what was made; what sampled so far becomes `before`."""
        self._before = self.old if self.old_differs else self._in_use
        self._in_use, self._ahead = self._ahead, {}
        if self._old_ahead:
            self.old, self._old_ahead = self._old_ahead, {}
            self.old_differs = self._old_ahead_differs
        self._point(self._in_use)
        self._note_change()

    def settle(self) -> None:
        """Note what the network holds as the version in use; forget those before and ahead."""
        self._before, self._ahead, self._old_ahead = {}, {}, {}
        self._in_use = {name: each.data for name, each in self._parameters.items()}
