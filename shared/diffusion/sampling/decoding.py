"""Decodes finished samples, concurrently with the denoising steps of the next ones.

A fragment whose steps are all taken leaves the device's main queue: it is decoded, copied to the
host and packed in another thread, on a GPU in a stream of its own, while the next fragment is
denoised. Both share the memory. Which of them finds none waits for the other and tries again,
before it takes fewer samples at a time or fails: alone, it is as it would be without the other.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from shared.diffusion.loading.device import RowsAtOnce, forget_frames, is_out_of_memory, release
from shared.diffusion.loading.models import ModelAdapter
from shared.errors import ContractError

T = TypeVar("T")

MAX_DECODED_LATENTS = 24 * 64
"""Numbers in the latents of samples that are decoded together, for latents of 8 x 8 pixels: a
model's smallest images have ten times as many."""


def decoded(model: ModelAdapter, latents: Tensor, device: torch.device) -> Tensor:
    """Decodes latents (B, ...) to bytes of images or videos on the host, one sample at a time but
    for the tiniest: decoding a video takes more memory than the network, and a batch is no faster.
    """
    if not latents.isfinite().all():
        raise ContractError("the latents of a sample are not finite: there is nothing to be seen")
    some = RowsAtOnce(device, most=max(1, MAX_DECODED_LATENTS // max(1, latents[0].numel())))
    return some.run(len(latents), lambda rows: to_uint8(model.decode(latents[rows])))


def to_uint8(images: Tensor) -> Tensor:
    """Converts (B, ..., C, H, W) in [0, 1] to bytes 0..255, rounded as image files are."""
    return (images * 255).round().clamp(0, 255).to(torch.uint8).cpu()


class SharedDevice:
    """Lets one thread take denoising steps while another one decodes, on the same device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = threading.Lock()
        """Held for each denoising step."""
        self._decoding = threading.Lock()
        """Held while samples are decoded."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_beside = False
        """Whether the current denoising step began during decoding."""
        self._busy_until = 0.0
        self._counting = threading.Lock()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds a denoising step."""
        with self._steps:
            self._is_beside = self._decoding.locked()
            yield

    def waited(self) -> bool:
        """In a step without memory, wait until decoding has ended; return whether there was any
        decoding, so that memory may be free now."""
        if not (self._is_beside or self._decoding.locked()):
            return False
        self._is_beside = False
        self._steps.release()  # decoding may have found no memory either
        try:
            with self._decoding:
                pass
        finally:
            self._steps.acquire()
        release(self._device)
        return True

    def begin(self, work: Callable[[], T]) -> T:
        """Returns what ``work`` returns, which is no denoising step. If it does not fit together
        with decoding, it is repeated after that has ended."""
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not self._decoding.locked():
                raise
            forget_frames(error)
        with self._decoding:
            release(self._device)
            return work()

    def decode(self, work: Callable[[], T], ready: "torch.cuda.Event | None") -> T:
        """Returns what ``work`` makes on the host of samples that are there once ``ready`` has
        happened, one call at a time. If it does not fit together with denoising steps, it is
        repeated between two of them.

        Raises:
            RuntimeError: the allocator's, if it does not fit alone.
        """
        with self._decoding, self._own_stream(ready):
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                forget_frames(error)
            with self._steps:
                if self._stream is not None:
                    torch.cuda.synchronize(self._device)
                release(self._device)
                return work()

    @contextmanager
    def _own_stream(self, ready: "torch.cuda.Event | None") -> Iterator[None]:
        if self._stream is None:
            yield
            return
        if ready is not None:
            self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()  # what it has read may be freed now

    @contextmanager
    def counted(self, add: Callable[[float], None]) -> Iterator[None]:
        """Gives ``add`` the seconds that the device is busy with the work inside, but for those in
        which other work was counted: so they add up to the seconds that it was busy at all."""
        began = time.monotonic()
        try:
            yield
        finally:
            now = time.monotonic()
            with self._counting:
                began, self._busy_until = max(began, self._busy_until), max(now, self._busy_until)
            add(max(0.0, now - began))
