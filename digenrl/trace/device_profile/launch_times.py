"""Seconds in which this machine's host launches a kernel, by a network so small that the device
always waits for it."""

import torch

from digenrl.trace.device_profile.ladder import median_seconds
from digenrl.trace.device_profile.measure import counted, denoising, training
from digenrl.trace.device_profile.models import ARCHITECTURES, ModelName
from digenrl.trace.device_profile.network import adapted, random_transformer
from services.scheduler.costs.host import HostCosts

REPEATS = 20


def measured_host(device: torch.device) -> HostCosts:
    """Times a tiny FLUX.1 with an adapter, in a second or two."""
    architecture = ARCHITECTURES[ModelName.flux1_dev].tiny()
    transformer = random_transformer(architecture, device)
    network = adapted(architecture, transformer, device, rank=4, checkpointing=True)
    launches = counted(network)
    step = median_seconds(device, denoising(network, 1, REPEATS + 2), REPEATS)
    trained = median_seconds(device, training(network, 1), REPEATS)
    return HostCosts(
        step_launch_seconds=step / launches.step,
        training_launch_seconds=trained / launches.training_pass,
    )


def describe_host() -> str:
    """Measure the host of this process's GPU, and explain how plans use it."""
    host = measured_host(torch.device("cuda"))
    step, trained = host.step_launch_seconds * 1e6, host.training_launch_seconds * 1e6
    return (
        f"the host launches a kernel in {step:.1f} us, in training in {trained:.1f}: "
        f"--launch-us {step:.1f},{trained:.1f}"
    )
