"""A network at full size with random weights: built where it is used, never in the host's memory.

Its parameters are drawn one by one on the device, in bfloat16, or in float32 where diffusers keeps
them so; what is computed in the constructor (position embeddings) stays as it is. The adapter is
the project's own, in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch import Tensor, nn

from digenrl.profile.models import Architecture
from shared.diffusion.policy import LoraSpec, attach_lora
from shared.diffusion.sampling.sampler import Velocity
from shared.diffusion.weights.trained_weights import trained_parameters
from shared.errors import UserError

DTYPE = torch.bfloat16
STD = 0.02
"""Standard deviation of the weights: activations stay finite, and no kernel gains from zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network that is measured, its adapter, and the inputs that fit it."""

    architecture: Architecture
    transformer: nn.Module
    device: torch.device

    @property
    def adapter(self) -> list[nn.Parameter]:
        return list(trained_parameters(self.transformer).values())

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return self.architecture.latent_shape(self._config)

    def velocity(self, rows: int) -> Velocity:
        """Returns the network's velocity for so many samples, each with conditioning of its own."""
        architecture = self.architecture
        conditions = architecture.conditions(self._config, architecture.size, rows, self._draw)

        def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
            found: Tensor = self.transformer(
                hidden_states=latents.to(DTYPE),
                timestep=sigma * architecture.timestep_scale,
                **conditions,
                return_dict=False,
            )[0]
            return found.float()

        return velocity

    @property
    def _config(self) -> dict[str, Any]:
        return dict(cast(Any, self.transformer).config)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=DTYPE)


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
    transformer.requires_grad_(False).eval().to(device)
    resolve_name(architecture.family.adapter).prepare(transformer)
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    lora = LoraSpec(rank=rank, alpha=2.0 * rank, targets=architecture.family.lora_targets, seed=0)
    attach_lora(transformer, lora)
    return Network(architecture=architecture, transformer=transformer, device=device)


def _network_class(architecture: Architecture) -> Any:
    import diffusers
    from diffusers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    build: Callable[..., Any] = getattr(diffusers, architecture.network)
    return build
