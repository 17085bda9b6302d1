"""Compiles the blocks that a network repeats, each kind once (`model.compile`).

Compilation begins with the first call of a shape and is no part of a result: where it fails, the
blocks run as they are from then on, and the log says why.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import structlog
import torch
from torch import nn

from shared.diffusion.device import is_out_of_memory
from shared.diffusion.experts import networks_of

MAX_REASON = 300
"""Characters quoted of a compiler's message."""

SHAPES = 64
"""Number of times that a block is compiled anew, for shapes and with and without gradients."""

log = structlog.get_logger()


@dataclass(eq=False)
class CompiledBlocks:
    """Compiles the blocks of a network until one cannot be."""

    blocks: list[nn.Module] = field(default_factory=list)
    reason: str | None = None
    """Reason why they run as they are, if they do."""

    def compile(self, backend: str) -> None:
        """Has every block compiled at its first call."""
        for block in self.blocks:
            # Of its own code, not of what all modules share: torch compiles each so often only.
            whole = torch.compile(block.forward, backend=backend)
            block._compiled_call_impl = _Compiled(self, block, whole)

    def give_up(self, reason: str) -> None:
        """Runs the blocks as they are from now on."""
        if self.reason is None:
            self.reason = reason
            log.warning("not_compiled", reason=reason, remedy="leave model.compile out")
        for block in self.blocks:
            block._compiled_call_impl = None


@dataclass(eq=False)
class _Compiled:
    """Stands for a block's call."""

    of: CompiledBlocks
    block: nn.Module
    whole: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.whole(*args, **kwargs)
        except Exception as error:
            if not _is_of_the_compiler(error):
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON]
        self.of.give_up(reason)
        return self.block._call_impl(*args, **kwargs)


def compile_blocks(network: nn.Module, backend: str = "inductor") -> CompiledBlocks:
    """Compiles the blocks of a network, or of both of an `Experts`, in place."""
    import torch._dynamo.config as limits

    limits.recompile_limit = max(limits.recompile_limit, SHAPES)
    made = CompiledBlocks([block for each in networks_of(network).values() for block in _of(each)])
    if not made.blocks:
        made.give_up(f"{type(network).__name__} names no blocks that it repeats")
    elif any(each._forward_hooks or each._forward_pre_hooks for each in made.blocks):
        made.give_up("something is called before or after each block")
    else:
        made.compile(backend)
    return made


def _of(network: nn.Module) -> Iterator[nn.Module]:
    """Yields the blocks that diffusers says are repeated, or are not to be split."""
    names = getattr(network, "_repeated_blocks", None) or ()
    names = names or getattr(network, "_no_split_modules", None) or ()
    yield from (each for each in network.modules() if type(each).__name__ in names)


def _is_of_the_compiler(error: Exception) -> bool:
    """Says whether an error is a compiler's, and not the block's own or for lack of memory."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return isinstance(error, TorchDynamoException | InductorError) and not is_out_of_memory(error)
