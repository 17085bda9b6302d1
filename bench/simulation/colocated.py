"""The colocated baselines: every device generates, then trains, all in lock-step.

2026-06   what the first colocated systems did: a rollout call per sample, the engine swapped
          through pageable memory, old log-probs computed anew, no TSP           (V1)
batched   the same with batched rollouts                                         (V2)
tuned     batched, swapped through pinned memory, log-probs kept, TSP            (V3)
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Literal

from services.scheduler.costs.profile import Profile
from services.scheduler.costs.seconds import fragment_seconds, gradient_seconds, speed

Baseline = Literal["2026-06", "batched", "tuned"]
BASELINES: tuple[Baseline, ...] = ("2026-06", "batched", "tuned")
COSTS = Path(__file__).with_name("colocated.json")


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """Costs of a device that generates and trains by turns.

    The pageable speed and the pinned swap were measured by SGLang's PR 32032 on an H200, with an
    engine of 58 GB; the extra seconds are fitted to the study's batched and tuned rows.
    """

    rollout_batch: int
    """Samples per forward call of the batched engine."""
    engine_gb: float
    """Size of what leaves and enters the device for each batch."""
    pageable_gb_per_second: float
    pageable_extra_seconds: float
    """Seconds per batch of putting the engine to sleep and waking it, beyond the copies."""
    pinned_swap_seconds: float
    """Seconds of the whole swap, one way."""


@cache
def switch_costs(profile: str) -> SwitchCosts:
    """Return the costs that belong to a shipped cost profile, by its name."""
    return SwitchCosts(**json.loads(COSTS.read_text())[profile])


def colocated_seconds(profile: Profile, devices: Mapping[str, int], baseline: Baseline) -> float:
    """Return the mean seconds of a batch on the best lock-step pool of these devices.

    Unequal devices slow a lock-step down, so a pool may be the fastest kind alone, or the two
    fastest, and so on. Infinite if no device holds the model in both roles.
    """
    able = [
        kind
        for kind, count in devices.items()
        if count and speed(profile, kind, "rollout") and speed(profile, kind, "trainer")
    ]
    able.sort(key=lambda kind: profile.devices[kind].training_speed, reverse=True)
    pools = ({kind: devices[kind] for kind in able[: size + 1]} for size in range(len(able)))
    return min((_lock_step(profile, pool, baseline) for pool in pools), default=math.inf)


def _lock_step(profile: Profile, devices: Mapping[str, int], baseline: Baseline) -> float:
    tuned = baseline == "tuned"
    batch = 1 if baseline == "2026-06" else switch_costs(profile.name).rollout_batch
    variant = profile.variant
    return (
        _rollout(profile, devices, batch)
        + _training(profile, devices, tuned=tuned)
        + profile.shape.updates * variant.optimizer_seconds
        + _swaps(profile, tuned=tuned)
        + variant.publish_seconds
        + variant.adopt_seconds
    )


def _rollout(profile: Profile, devices: Mapping[str, int], batch: int) -> float:
    """Return the seconds until the last device has generated its share of the batch."""
    each = {kind: fragment_seconds(profile, kind, batch) / batch for kind in devices}
    shares = whole_shares(profile.shape.samples, devices, each)
    width = _expected_maximum(sum(devices.values())) * profile.rollout.noise_cv

    def seconds(kind: str, samples: int) -> float:
        calls, rest = divmod(samples, batch)
        times = [fragment_seconds(profile, kind, batch)] * calls
        times += [fragment_seconds(profile, kind, rest)] if rest else []
        return sum(times) + width * math.hypot(*times)

    return max(seconds(kind, share) for kind, share in shares.items())


def _training(profile: Profile, devices: Mapping[str, int], *, tuned: bool) -> float:
    """Train equal shares at the slowest device's speed; old log-probs cost another forward pass."""
    samples, rho = profile.shape.samples / sum(devices.values()), profile.variant.rho
    passes, size = 1.0, profile.shape.group_size
    if not tuned:
        samples, passes = math.ceil(samples), (rho + 1) / rho
    slowest = max(gradient_seconds(profile, kind, size) for kind in devices)
    return samples * passes * slowest / size


def _swaps(profile: Profile, *, tuned: bool) -> float:
    """Return the seconds in which the engine leaves the devices and comes back."""
    costs = switch_costs(profile.name)
    if tuned:
        return 2 * costs.pinned_swap_seconds
    return 2 * costs.engine_gb / costs.pageable_gb_per_second + costs.pageable_extra_seconds


def _expected_maximum(count: int) -> float:
    """Return the expected maximum of so many standard normal variables (Blom 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def whole_shares(
    items: int, devices: Mapping[str, int], seconds: Mapping[str, float]
) -> dict[str, int]:
    """Return how many of `items` a device of each kind takes at most, to end the soonest.

    Args:
        devices: number of devices of each kind.
        seconds: time of one item on each kind that can take part; the others take none.
    """
    shares = {kind: 0 for kind in seconds if devices[kind] > 0}
    left = items if shares else 0
    while left > 0:
        kind = min(shares, key=lambda kind: (shares[kind] + 1) * seconds[kind])
        shares[kind] += 1
        left -= devices[kind]
    return shares
