"""Counts what makes the host wait for a device, on any device.

Tensors of the meta device have no values, so that one which is read there is an error: a network
that lies on it stands for one on a GPU, in every place where a GPU would be waited for.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

READS = {
    aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.nonzero,
    aten.nonzero_numpy, aten.masked_select, aten._unique, aten._unique2, aten.unique_dim,
    aten.unique_consecutive, aten.bincount, aten.allclose,
}  # fmt: skip
"""Calls whose result, or its shape, is known to the host only once the device has come to it."""


class HostReads(TorchDispatchMode):
    """Notes the calls that wait, by name: reads, and copies between host and device that are not
    queued."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._overloadpacket in READS or _selects_by_values(func, args):
            self.found.append(f"{func} of {args[0].device}")
        if func is aten._to_copy.default and _waits(args[0], kwargs):
            self.found.append(f"{func} from {args[0].device} to {kwargs['device']}")
        return func(*args, **kwargs)


def _selects_by_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether rows are picked where a mask is true, so that their number is read."""
    if func not in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        return False
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _waits(source: Tensor, kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and device != source.device and not kwargs.get("non_blocking")
