"""What it costs to change over on one device (TAG), and to bring new weights to another."""

import asyncio
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from digenrl.profile.network import Network
from digenrl.profile.timing import Stopwatch, timed
from shared.diffusion.tensors import pack, unpack
from shared.diffusion.weights import WeightsInUse, stage_weights, trained_tensors
from shared.store import StoreSettings, open_store

Work = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """The change from training, with a gradient that is not committed, to denoising and back."""

    to_generation_seconds: float
    """The first denoising step after training, beyond the second. Noise can make it negative."""
    to_training_seconds: float
    """The first training pass after denoising, beyond the second."""
    gradient_unchanged: bool
    """Whether the denoising steps left it as it was, to the last bit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The adapter's way from the trainer into use on another device, in the order of its parts."""

    num_bytes: int
    sha256: str
    pack_seconds: float
    store_seconds: float
    """Digest, write and flush, to a folder."""
    fetch_seconds: float
    """Read, verify, unpack."""
    stage_seconds: float
    """To the device, and digested there; beside generation."""
    pause_seconds: float
    """Between two fragments: the exchange of pointers."""

    @property
    def seconds(self) -> float:
        """Seconds from the optimizer step to weights that can be adopted."""
        return self.pack_seconds + self.store_seconds + self.fetch_seconds + self.stage_seconds


def changing_over(network: Network, *, denoise: Work, train: Work, repeats: int) -> Switch:
    """Trains, denoises twice, trains twice, and so on: the first of two pays for the change.

    Raises:
        torch.OutOfMemoryError: if the device cannot do one beside what the other leaves.
    """
    device = network.device
    denoise()
    train()
    kept = [gradient.clone() for gradient in _gradients(network)]
    steps: list[tuple[float, float]] = []
    passes: list[tuple[float, float]] = []
    unchanged = True
    for _ in range(repeats):
        steps.append((timed(device, denoise), timed(device, denoise)))
        unchanged = unchanged and _same_bits(kept, _gradients(network))
        passes.append((timed(device, train), timed(device, train)))
        for copy, gradient in zip(kept, _gradients(network), strict=True):
            copy.copy_(gradient)
    return Switch(
        to_generation_seconds=_first_beyond_second(steps),
        to_training_seconds=_first_beyond_second(passes),
        gradient_unchanged=unchanged,
    )


def publication(network: Network, repeats: int) -> Publication:
    """Returns medians of ``repeats``, after one that does not count."""
    rounds = [_published(network) for _ in range(repeats + 1)][1:]

    def median(part: str) -> float:
        seconds: list[float] = [getattr(each, part) for each in rounds]
        return statistics.median(seconds)

    return Publication(
        num_bytes=rounds[-1].num_bytes,
        sha256=rounds[-1].sha256,
        pack_seconds=median("pack_seconds"),
        store_seconds=median("store_seconds"),
        fetch_seconds=median("fetch_seconds"),
        stage_seconds=median("stage_seconds"),
        pause_seconds=median("pause_seconds"),
    )


def _published(network: Network) -> Publication:
    in_use = WeightsInUse(network.transformer)
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(StoreSettings(url=f"file://{folder}"))
        watch = Stopwatch(network.device)
        data = pack(trained_tensors(network.transformer))
        packed = watch.lap()
        ref = asyncio.run(store.put("adapter", data, suffix=".safetensors"))
        stored = watch.lap()
        tensors = unpack(asyncio.run(store.get(ref)))
        fetched = watch.lap()
        staged = stage_weights(network.transformer, tensors)
        prepared = watch.lap()
        in_use.adopt(staged)
        paused = watch.lap()
    return Publication(
        num_bytes=ref.size,
        sha256=ref.sha256,
        pack_seconds=packed,
        store_seconds=stored,
        fetch_seconds=fetched,
        stage_seconds=prepared,
        pause_seconds=paused,
    )


def _gradients(network: Network) -> list[Tensor]:
    return [weight.grad for weight in network.adapter if weight.grad is not None]


def _same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    """Compares float32 tensors by their bits: a value that is no number equals nothing."""
    pairs = zip(left, right, strict=True)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def _first_beyond_second(pairs: list[tuple[float, float]]) -> float:
    firsts, seconds = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return statistics.median(firsts) - statistics.median(seconds)
