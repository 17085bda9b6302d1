"""Kinds of devices that a cost profile lacks: forecasts from data sheets, and others by memory.

A forecast speed relative to an H100 is the geometric mean of two ratios to an H100 SXM: dense
bfloat16 operations per second accumulated in float32 (989.4 TFLOPS), and memory bandwidth (3,350
GB/s). By that rule an A100 would have 1.01 times the speed that the profiles assume, an L40S 1.11
times, a 4090 0.87 times and an H20 1.5 times. No forecast was measured. Sources are NVIDIA's
architecture papers of Ampere GA102 (3090, A6000), RTX Blackwell (5090) and RTX PRO Blackwell (RTX
PRO 6000 Workstation Edition), and the data sheets of L40 and HGX B200. The operations of a 4070 are
scaled from a 4090 by multiprocessors and clock.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping

from services.scheduler.costs.sizes import Factor
from shared.messages.records import Record, Text

SIZED_KIND = re.compile(
    r"([\w.-]+(?: [\w.-]+)*)\s*=\s*(\d+(?:\.\d+)?)GiB(?:\*(\d+))?", re.IGNORECASE
)
"""Kind, memory and number of devices: ``name=32GiB`` is one, ``name=32GiB*4`` are four."""


class Device(Record):
    generation_speed: Factor
    """Relative to an H100."""
    training_speed: Factor
    memory_gib: Factor
    host_gb_per_second: Factor = 25.0
    """Speed at which weights come from the host's pinned memory; default: PCIe 4.0 x16."""
    note: Text = ""
    """Where the speeds are from, if not from the profile."""


def forecast(tflops: float, gb_per_second: float, memory_gib: float) -> Device:
    """Return a device by its data sheet, with the memory that a driver leaves."""
    speed = round(math.sqrt(tflops / 989.4 * gb_per_second / 3350), 4)
    note = "its speed is a forecast from the data sheet, not measured"
    return Device(generation_speed=speed, training_speed=speed, memory_gib=memory_gib, note=note)


FORECASTS: Mapping[str, Device] = {
    "5090": forecast(209.5, 1792, 31),
    "3090": forecast(71, 936, 23),
    "4070": forecast(58.3, 504, 11.5),
    "A6000": forecast(154.8, 768, 47),
    "L40": forecast(181, 864, 44),
    "B200": forecast(2250, 8000, 178),
    "RTX-PRO-6000": forecast(503.8, 1792, 94),
}


def with_sized(devices: Mapping[str, Device], text: str) -> dict[str, Device]:
    """Return the devices, with the kinds of ``text`` whose memory is given. A kind that is not
    known has the speed of the slowest one that is."""
    slowest = min(devices.values(), key=lambda device: device.training_speed)
    note = "its speed is unknown, and taken as that of the slowest known kind"
    extended = dict(devices)
    for word, gib, _ in SIZED_KIND.findall(text):
        kind = kind_named(devices, word)
        like = slowest.model_copy(update={"note": note}) if kind is None else devices[kind]
        extended[kind or word] = like.model_copy(update={"memory_gib": float(gib)})
    return extended


def kind_named(devices: Iterable[str], word: str) -> str | None:
    """Return the kind that a word names, such as "RTX 4090" or "rtx pro 6000"; None if none is."""
    return {_plain(kind): kind for kind in devices}.get(_plain(word))


def _plain(word: str) -> str:
    return re.sub(r"[^a-z0-9]|nvidia|geforce|rtx", "", word.lower())


def notes(devices: Mapping[str, Device], kinds: Iterable[str]) -> Iterator[str]:
    """Return a line for each kind whose speed does not come from the profile."""
    return (f"{kind}: {devices[kind].note}" for kind in kinds if devices[kind].note)
