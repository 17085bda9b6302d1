"""Which operations launch a kernel on a GPU: a host's time of a call is about as many times as long
as one launch takes it."""

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

MEMORY_ALONE = (
    aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
    aten.new_empty_strided,
)  # fmt: skip
"""Operations that make a view or memory without values, which their schemas do not declare."""


@cache
def is_launch(func: Any) -> bool:
    """Whether an operation of torch computes or copies: a view and a question do not."""
    returned = [each.alias_info for each in func._schema.returns]
    is_view = bool(returned) and all(each is not None and not each.is_write for each in returned)
    return not (is_view or func.namespace == "prim" or func._overloadpacket in MEMORY_ALONE)


class LaunchCounter(TorchDispatchMode):
    """Counts launches of work on tensors of any kind."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: int = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.launches += is_launch(func)
        return func(*args, **(kwargs or {}))
