"""Devices of a bench as they are typed, and hosts that were measured."""

from digenrl.planning.hosts import parse_hosts
from digenrl.planning.runnable import HOST_GPUS
from services.scheduler.costs.host import HostCosts
from services.scheduler.costs.profile import Profile

H200_HOST = HostCosts(step_launch_seconds=20.8e-6, training_launch_seconds=30e-6)
"""Measured on the H200 of docs/gpu-day: 0.173 s for the 8,317 launches of a call of Qwen-Image, and
0.984 s for the 32,651 of a pass."""


def parse_devices(option: str, text: str, profile: Profile) -> dict[str, int]:
    """Parse ``h100=16,a100=16`` or ``h100x8*2+a100x8*2`` into {"H100": 16, "A100": 16}.

    Raises:
        UserError: names the option, the problem and the remedy.
    """
    return parse_hosts(option, text, profile, host_gpus=HOST_GPUS).devices
