"""Costs of encoding a prompt, by the size of its encoders: on a device, and on threads of a CPU.

Encoders read each of their weights once, and compute two operations with it for each token of the
prompt. Results of encoding are stored by digest, and a run encodes each of its prompts once.
"""

from services.scheduler.costs.profile import Profile

GIB = 2**30
WEIGHT_BYTES = 2
DEVICE_TFLOPS, DEVICE_GB_PER_SECOND = 400.0, 3350.0
"""Speed of an H100 in a network's forward pass, and of its memory."""
THREAD_TFLOPS = 0.09
"""A thread of a CPU: CLIP-H took 3.5 s of one for an image, .32e12 operations."""


def encoding_seconds(profile: Profile) -> float:
    """Return the seconds in which an H100 encodes a prompt."""
    if profile.memory is None:
        return 0.0
    reads = profile.memory.text_gib * GIB / 1e9 / DEVICE_GB_PER_SECOND
    return max(reads, _tflop(profile) / DEVICE_TFLOPS)


def thread_seconds(profile: Profile) -> float:
    """Return the seconds in which a thread of a CPU does."""
    return _tflop(profile) / THREAD_TFLOPS


def _tflop(profile: Profile) -> float:
    if profile.memory is None or profile.work is None:
        return 0.0
    weights = profile.memory.text_gib * GIB / WEIGHT_BYTES
    return 2 * weights * profile.work.text_tokens / 1e12
