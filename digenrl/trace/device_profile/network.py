"""A network at full size with random weights: built where it is used, never in the host's memory.

Its parameters are drawn one by one on the device, in bfloat16, or in float32 where diffusers keeps
them so; what is computed in the constructor (position embeddings) stays as it is. The adapter is
the project's own, in float32.
"""

from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from digenrl.trace.device_profile.models import Architecture
from shared.diffusion.families.base import Family, quiet_diffusers
from shared.diffusion.loading.network import diffusers_class
from shared.diffusion.policy import LoraSpec, attach_lora
from shared.diffusion.sampling.sampler import Velocity
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.errors import UserError

DTYPE = torch.bfloat16
STD = 0.02
"""Standard deviation of the weights: activations stay finite, and no kernel gains from zeros."""


class Network:
    """The network that is measured, as its family's adapter runs it, and the inputs that fit it."""

    def __init__(self, architecture: Architecture, transformer: nn.Module) -> None:
        """Prepare the transformer, in place, as its family does."""
        self.architecture = architecture
        self.device = next(transformer.parameters()).device
        decoder = SimpleNamespace(config=architecture.decoder)
        self._family: Family = resolve_name(architecture.family.adapter)(
            SimpleNamespace(transformer=transformer, vae=decoder), architecture.family,
            device=self.device, dtype=DTYPE, text_tokens=architecture.size.text_tokens,
        )  # fmt: skip
        self.transformer = self._family.transformer

    @property
    def adapter(self) -> list[nn.Parameter]:
        return list(trained_parameters(self.transformer).values())

    @property
    def latent_shape(self) -> tuple[int, ...]:
        size = self.architecture.size
        return self._family.latent_shape(height=size.height, width=size.width, frames=size.frames)

    def velocity(self, rows: int) -> Velocity:
        """Return the network's velocity for this many samples, each with its own conditions."""
        spec, tokens = self.architecture.family, self.architecture.size.text_tokens
        conditions = {
            name: torch.randn(rows, *shape, device=self.device, dtype=DTYPE)
            for name, shape in spec.condition_shapes(self._family.config, tokens).items()
        }

        def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
            return self._family.velocity(
                latents, sigma, conditions, guidance=self.architecture.guidance
            )

        return velocity


def random_transformer(architecture: Architecture, device: torch.device) -> Any:
    """Builds the architecture with random weights."""
    from accelerate import init_empty_weights

    # Parameters get no memory yet, and buffers are as they should be.
    with init_empty_weights(include_buffers=False):
        transformer = _network_class(architecture).from_config(dict(architecture.config))
    draw_parameters(transformer, device)
    return transformer


def loaded_transformer(architecture: Architecture, folder: Path) -> Any:
    """Loads the transformer of a diffusers folder.

    Raises:
        UserError: if the folder has none of this architecture.
    """
    try:
        return _network_class(architecture).from_pretrained(
            folder, subfolder="transformer", dtype=DTYPE, local_files_only=True
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"--folder: cannot load {architecture.network} from {folder}: {reason}"
        ) from error


@torch.no_grad()
def draw_parameters(network: nn.Module, device: torch.device) -> None:
    """Gives every parameter memory on the device, and small normal values."""
    kept: list[str] = getattr(network, "_keep_in_fp32_modules", None) or []
    for name, parameter in list(network.named_parameters()):
        path, _, own = name.rpartition(".")
        dtype = torch.float32 if set(kept) & set(name.split(".")) else DTYPE
        drawn = torch.empty(parameter.shape, device=device, dtype=dtype)
        is_scale = own == "weight" and parameter.dim() == 1
        drawn.normal_(1.0 if is_scale else 0.0, STD)
        network.get_submodule(path).register_parameter(own, nn.Parameter(drawn))
    network.to(device)  # the buffers


def adapted(
    architecture: Architecture, transformer: Any, device: torch.device, *, rank: int,
    checkpointing: bool,
) -> Network:  # fmt: skip
    """Attaches an adapter of this rank to the architecture's transformer."""
    network = Network(architecture, transformer.requires_grad_(False).eval().to(device))
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    lora = LoraSpec(rank=rank, alpha=2.0 * rank, targets=architecture.family.lora_targets, seed=0)
    attach_lora(transformer, lora)
    return network


def _network_class(architecture: Architecture) -> Any:
    quiet_diffusers()
    return diffusers_class(architecture.network)
