"""The sets of trained weights of one network on a device.

    in use      the version in training; the network's parameters
    old         the old policy, which samples in place of the trained policy
    reference   reference policy of KL and DPO; it never changes. If all weights are trained, this
                set is in host memory
    start       proximal policy: the version before the batch's first update
    ahead       result of the updates so far; `take` puts it in use
    before      sampling weights of the previous version, for fragments that began with it

The network switches to another set by exchanging pointers. Nothing is copied, and gradients stay
with the parameters. Only the holder of the device's lock may switch. A step or a copy accesses a
set by name and does not depend on the switch. `TrainedSets` (`shared.models.memory`) counts the
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
"""Weights by exported name, with the shapes and on the device of the parameters."""


@dataclass(frozen=True, slots=True)
class VersionSets:
    """The sets of one version."""

    trained: Tensors
    sampling: Tensors
    """The same object as ``trained`` without an old policy."""


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
        """Set by `settle`."""
        self._ahead: Tensors = {}
        self._old_ahead: dict[str, Tensor] = {}
        """Old policy of the version ahead."""
        self._old_ahead_differs = False
        self._before: Tensors = {}
        self._samples_before = False

    @property
    def newest(self) -> VersionSets:
        """The version ahead if there is one, otherwise the version in use."""
        trained = self._ahead or self._in_use
        differs = self._old_ahead_differs if self._old_ahead else self.training_differs
        return VersionSets(trained, self.newest_old if differs else trained)

    @property
    def newest_old(self) -> Tensors:
        """The old policy of the newest version; empty if the run keeps none."""
        return self._old_ahead or self.old

    def copies(self, tensors: Tensors) -> dict[str, Tensor]:
        """Return copies of weights on the network's device, which no update changes."""
        return {
            name: tensors[name].detach().to(each.device, copy=True)
            for name, each in self._parameters.items()
        }

    def keep_reference(self, *, on_host: bool) -> None:
        """Copy the network's weights as the reference policy."""
        if not on_host:
            self.reference = self.copies(self._parameters)
            return
        device = next(iter(self._parameters.values())).device
        self.reference = HostBlocks(self._network, host_memory(device))
        for name, each in self._parameters.items():
            self.reference.store(name, each.detach().clone())

    # The old policy.

    def keep_old(self) -> None:
        """Start an old policy as a copy of the network's weights."""
        self.old = self.copies(self._parameters)
        self.old_differs = False

    def forget_old(self) -> None:
        self.old, self.old_differs = {}, False

    def follow(self, decay: float) -> None:
        """Move the old policy towards the network's weights."""
        self._follow(self.old, self._parameters, decay)
        self._changed(old_differs=decay > 0)

    @staticmethod
    @torch.no_grad()
    def _follow(old: Tensors, trained: Tensors, decay: float) -> None:
        """Set ``old`` to decay x ``old`` + (1 - decay) x ``trained``, in place."""
        for name, tensor in old.items():
            if decay:
                tensor.mul_(decay).add_(trained[name], alpha=1 - decay)
            else:
                tensor.copy_(trained[name])

    @torch.no_grad()
    def compare_old(self) -> None:
        """Compare the old policy, which was written in place, with the network's weights."""
        same = (torch.equal(each, self._parameters[n]) for n, each in self.old.items())
        self._changed(old_differs=not all(same))

    def _changed(self, *, old_differs: bool) -> None:
        self.old_differs = old_differs
        self._note_change()

    def _note_change(self) -> None:
        """Increment the parameters' version counters, because their values have changed in place or
        the allocator may reuse their memory."""
        torch.autograd.graph.increment_version(list(self._parameters.values()))

    # Switches of the network.

    @property
    def training_differs(self) -> bool:
        """Whether the trained weights differ from the sampling weights."""
        return self.old_differs or bool(self.old and self._ahead)

    def sampling(self) -> AbstractContextManager[None]:
        """Switch the network to the sampling weights, without gradients."""
        if self._samples_before:
            return self.using(self._before)
        return self.using(self.old) if self.old_differs else nullcontext()

    @contextmanager
    def before(self) -> Iterator[None]:
        """Sample with the previous version inside this context."""
        self._samples_before = True
        try:
            yield
        finally:
            self._samples_before = False

    def training(self) -> AbstractContextManager[None]:
        """Switch the network to the weights that the next update starts from, with gradients."""
        return self.using(self._ahead) if self._ahead else nullcontext()

    def comparing(self) -> AbstractContextManager[None]:
        """Switch the network to the reference policy, without gradients."""
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

    # The version ahead.

    def make(self, ahead: Tensors, old_decay: float | None) -> None:
        """Keep the result of an update until `take`.

        Args:
            old_decay: decay of the old policy; None if the update does not change it.
        """
        self._ahead = ahead
        if old_decay is not None:
            self._old_ahead = {name: each.clone() for name, each in self.old.items()}
            self._follow(self._old_ahead, ahead, old_decay)
            self._old_ahead_differs = old_decay > 0

    def take(self) -> None:
        """Put the version ahead in use; the previous sampling weights become `before`."""
        self._before = self.old if self.old_differs else self._in_use
        self._in_use, self._ahead = self._ahead, {}
        if self._old_ahead:
            self.old, self._old_ahead = self._old_ahead, {}
            self.old_differs = self._old_ahead_differs
        self._point(self._in_use)
        self._note_change()

    def settle(self) -> None:
        """Set the network's weights as the version in use; forget the sets before and ahead."""
        self._before, self._ahead, self._old_ahead = {}, {}, {}
        self._in_use = {name: each.data for name, each in self._parameters.items()}
