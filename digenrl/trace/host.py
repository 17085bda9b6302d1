"""Seconds in which this machine's host launches a kernel, by a network so small that the device
always waits for the host."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from digenrl.trace.launches import LaunchCounter
from services.scheduler.costs.host import HostCosts
from shared.diffusion.policy import LoraSpec, attach_lora
from shared.models.families import FAMILIES

REPEATS = 20
DTYPE = torch.bfloat16
IMAGE_TOKENS, TEXT_TOKENS, WIDTH = 4, 8, 32
NETWORK = {
    "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16,
    "joint_attention_dim": WIDTH, "pooled_projection_dim": WIDTH, "axes_dims_rope": (4, 6, 6),
    "in_channels": WIDTH, "guidance_embeds": True,
}  # fmt: skip
"""FLUX.1 in miniature."""


def measured_host(device: torch.device) -> HostCosts:
    """Time a forward pass, and one with a checkpointed backward pass, in a second or two."""
    network, inputs = _network(device), _inputs(device)

    def train() -> None:
        network(**inputs)[0].float().mean().backward()

    @torch.no_grad()
    def step() -> None:
        network(**inputs)

    return HostCosts(
        step_launch_seconds=_launch_seconds(step, device),
        training_launch_seconds=_launch_seconds(train, device),
    )


def described_host() -> str:
    """Measure the host of this process's GPU, and say how plans are told."""
    found = measured_host(torch.device("cuda"))
    step, trained = found.step_launch_seconds * 1e6, found.training_launch_seconds * 1e6
    return (
        f"the host launches a kernel in {step:.1f} us, in training in {trained:.1f}: "
        f"--launch-us {step:.1f},{trained:.1f}"
    )


def _network(device: torch.device) -> Any:
    import diffusers

    network = diffusers.FluxTransformer2DModel(**NETWORK).to(device, DTYPE)
    network.requires_grad_(False).eval()
    network.enable_gradient_checkpointing()
    targets = FAMILIES["FluxPipeline"].lora_targets
    attach_lora(network, LoraSpec(rank=4, alpha=8.0, targets=targets, seed=0))
    return network


def _inputs(device: torch.device) -> dict[str, Any]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=DTYPE)

    return {
        "hidden_states": draw(1, IMAGE_TOKENS, WIDTH),
        "encoder_hidden_states": draw(1, TEXT_TOKENS, WIDTH),
        "pooled_projections": draw(1, WIDTH),
        "timestep": draw(1),
        "guidance": draw(1),
        "img_ids": draw(IMAGE_TOKENS, 3),
        "txt_ids": draw(TEXT_TOKENS, 3),
        "return_dict": False,
    }


def _launch_seconds(work: Callable[[], None], device: torch.device) -> float:
    """Return the median seconds of the work over the number of its kernels."""
    counter = LaunchCounter()
    with counter:
        work()
    found = list[float]()
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found) / counter.launches
