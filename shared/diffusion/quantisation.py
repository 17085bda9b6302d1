"""Loads a network in fewer bits than it is trained in, by diffusers' quantisation.

int8 and fp8 are torchao's, of the weights alone and with a scale per row: products are computed in
the type of the activations. Only matrices of the network's blocks are quantised: what is outside of
them (embeddings, the projections from and to latents) is small, and every step goes through it.
nf4 is bitsandbytes', of all matrices.
"""

from typing import Any

import structlog
import torch

from shared.errors import UserError
from shared.models.memory import BLOCK, Form
from shared.models.quantised import UNTESTED, check_installed

log = structlog.get_logger()


def network_dtype(form: Form | None, dtype: torch.dtype) -> torch.dtype:
    """Returns the type in which a network of this form computes; ``dtype`` is the trainer's."""
    return torch.bfloat16 if form == "bf16" else dtype


def quantisation(form: Form | None, networks: list[str], dtype: torch.dtype) -> dict[str, Any]:
    """Returns what a pipeline's `from_pretrained` takes besides to load ``networks`` in this form;
    ``dtype`` is the type that they compute in.

    Raises:
        UserError: if the package that quantises so is not installed, or needs a GPU.
    """
    check_installed(form)
    if form is None or form == "bf16":
        return {}
    if form == "nf4" and not torch.cuda.is_available():
        raise UserError('rollout.weights: "nf4" needs a GPU; use "int8", or leave it out')
    if form in UNTESTED:
        log.warning("untested_weights", weights=form, hint="no report from a GPU: watch the ratios")
    from diffusers import PipelineQuantizationConfig

    config = _nf4(dtype) if form == "nf4" else _torchao(form)
    return {"quantization_config": PipelineQuantizationConfig(
        quant_mapping={network: config for network in networks}
    )}  # fmt: skip


def _torchao(form: Form) -> Any:
    from diffusers import TorchAoConfig
    from torchao.quantization import Float8WeightOnlyConfig, FqnToConfig, Int8WeightOnlyConfig

    kind = Int8WeightOnlyConfig if form == "int8" else Float8WeightOnlyConfig
    weights = kind(set_inductor_config=False)  # nothing is compiled
    return TorchAoConfig(FqnToConfig({f"re:{BLOCK.pattern}.*": weights}))


def _nf4(dtype: torch.dtype) -> Any:
    from diffusers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
