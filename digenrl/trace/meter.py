"""Measures work on fake tensors: bytes of storages that live, operations and launched kernels.

Fake tensors have shapes and types, and no values. Every operation passes the meter: storages that
it makes count until they are freed, each once, however many views of it there are. Memory held
beforehand does not count. A value that is read, a loss or a test whether numbers are finite, is
answered: 1, or yes.

It does not see what a GPU takes besides: the allocator's slack, work spaces of kernels, and buffers
of NCCL.
"""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry

from digenrl.trace.launches import is_launch
from shared.diffusion.loading.ranks import local_shard

aten = torch.ops.aten

Phase = Literal["forward", "backward", "without_gradient"]

ATTENTION = aten._scaled_dot_product_flash_attention
FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[ATTENTION],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
"""Operations of one call, by its arguments; fake tensors count as CPU tensors."""

TENSOR_TYPES = (Tensor, nn.Parameter)
"""Types of tensors with values."""

CONSTANT_CALLS = (aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default)
"""Calls whose argument is a new constant."""


@dataclass(slots=True)
class Section:
    """Holds what was measured of a piece of work."""

    peak_bytes: int = 0
    """Most that lived at a time, beyond a base."""
    operations: Counter[tuple[Phase, str]] = field(default_factory=Counter)
    """Floating-point operations by phase and type."""
    launches: int = 0
    """Kernels that a host launches for it on a GPU."""

    def flops(self, *phases: Phase) -> dict[str, int]:
        """Returns operations by type, of these phases."""
        counts: Counter[str] = Counter()
        for (phase, dtype), number in self.operations.items():
            if phase in phases:
                counts[dtype] += number
        return dict(sorted(counts.items()))


class Meter(TorchDispatchMode):
    """Is entered inside of a fake mode, once for all sections."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        gc.collect()
        gc.freeze()  # what is imported or loaded before stays: `live` skips it
        self._fakes = fakes
        self._sizes: dict[int, int] = {}
        """Address of a storage -> bytes that are counted of it."""
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._held: set[int] = set()
        """Storages that count as nothing."""
        self._watched: set[int] = set()
        """Storages that FSDP fills and empties again, without an operation."""
        self._live = 0
        self._peak = 0
        self._operations: Counter[tuple[Phase, str]] = Counter()
        self._launches = 0

    def hold(self, *modules: nn.Module) -> None:
        """Counts the weights of modules as nothing: they are resident."""
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self._hold(local_shard(tensor).untyped_storage())

    @property
    def live(self) -> int:
        """Bytes that live now."""
        gc.collect()
        self._settle()
        return self._live

    @contextmanager
    def section(self, base: int) -> Iterator[Section]:
        """Measures the work in it; its peak is that beyond ``base``, which lived at some time."""
        new_section = Section()
        self._peak, self._operations, self._launches = self.live, Counter(), 0
        yield new_section
        new_section.peak_bytes, new_section.operations = self._peak - base, self._operations
        new_section.launches = self._launches

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # until it has become an operation on local tensors
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return _answer(args[0])
        if func not in CONSTANT_CALLS and (
            _has_real(args) or (kwargs and _has_real(kwargs.values()))
        ):
            args, kwargs = tree_map_only(Tensor, self._as_fake, (args, kwargs))
        out = func(*args, **kwargs)
        self._launches += is_launch(func)
        self._count(func, args, kwargs, out)
        if func.namespace == "fsdp":
            self._watch(args, kwargs)
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                self._register(tensor.untyped_storage())
        if self._live > self._peak:
            self._settle()
            self._peak = max(self._peak, self._live)
        return out

    def _as_fake(self, tensor: Tensor) -> Tensor:
        """Gives a tensor of the host, which takes nothing of the device, to a fake operation."""
        if type(tensor) not in TENSOR_TYPES:
            return tensor
        fake = self._fakes.from_tensor(tensor)
        self._hold(fake.untyped_storage())
        return fake

    def _hold(self, storage: torch.UntypedStorage) -> None:
        self._register(storage)
        address = storage._cdata
        self._resize(address, 0)
        self._held.add(address)

    def _register(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._sizes:
            return
        self._sizes[address] = size = storage.nbytes()
        self._live += size
        self._alive[address] = weakref.ref(storage, lambda _: self._forget(address))

    def _forget(self, address: int) -> None:
        self._live -= self._sizes.pop(address, 0)
        self._alive.pop(address, None)
        self._watched.discard(address)
        self._held.discard(address)

    def _watch(self, *arguments: Any) -> None:
        """Notices that storages among FSDP's arguments are full again."""
        for tensor in tree_iter(arguments):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                self._register(storage)
                if storage._cdata not in self._held:
                    self._resize(storage._cdata, storage.nbytes())
                    self._watched.add(storage._cdata)

    def _settle(self) -> None:
        """Detect watched storages that have become empty, for which there is no event."""
        for address in tuple(self._watched):
            storage = self._alive[address]()
            if storage is not None:
                self._resize(address, storage.nbytes())
            if not self._sizes[address]:
                self._watched.discard(address)

    def _resize(self, address: int, size: int) -> None:
        self._live += size - self._sizes[address]
        self._sizes[address] = size

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        formula = FORMULAS.get(func._overloadpacket)
        if formula is not None:
            dtype = next(a.dtype for a in args if isinstance(a, Tensor))
            key = (_phase(), str(dtype).removeprefix("torch."))
            self._operations[key] += formula(*args, **kwargs, out_val=out)


def _phase() -> Phase:
    if torch._C._current_graph_task_id() != -1:
        return "backward"  # checkpointed blocks are computed again in it
    # Within an autograd function gradients of either kind are off, under no_grad those of one kind.
    is_differentiated = torch.is_grad_enabled() or not torch._C._is_fwd_grad_enabled()
    return "forward" if is_differentiated else "without_gradient"


def _answer(tensor: Tensor) -> bool | float | int:
    """Stands in for a value that is read."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else 1


def _has_real(values: Iterable[Any]) -> bool:
    """Whether a tensor with values is among these, or in a list among them."""
    for value in values:
        if type(value) in TENSOR_TYPES or (type(value) in (list, tuple) and _has_real(value)):
            return True
    return False
