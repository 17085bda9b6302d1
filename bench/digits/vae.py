"""An autoencoder that leaves 8 x 8 images as they are, written down instead of trained.

AutoencoderKL ends each half with GroupNorm, SiLU and a convolution. Four channels (x, -x, K, -K)
pass that unharmed: the constants make up nearly all of the group's variance, so the norm divides
every image by the same number, and SiLU(u) - SiLU(-u) = u. What is left is a relative error of
mean(x^2) / 2 K^2. So latents are pixels in -1..1, while the code that runs is the real decoder's.
"""

from typing import Any

import torch
from torch import nn

from bench.digits.data import SIZE

CONSTANT = 64.0
SCALING, SHIFT = 1.5305, 0.0609
"""SD3's: latents = (encoded - SHIFT) * SCALING."""


@torch.no_grad()
def build_vae() -> Any:
    from diffusers import AutoencoderKL

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of the weights that nothing depends on
        vae = AutoencoderKL(
            in_channels=1,
            out_channels=1,
            down_block_types=("DownEncoderBlock2D",),
            up_block_types=("UpDecoderBlock2D",),
            block_out_channels=(4,),
            layers_per_block=1,
            latent_channels=1,
            norm_num_groups=1,
            sample_size=SIZE,
            scaling_factor=SCALING,
            shift_factor=SHIFT,
            use_quant_conv=False,
            use_post_quant_conv=False,
            mid_block_add_attention=False,
        )
    for half in (vae.encoder, vae.decoder):
        _silence_residuals(half)
        _spread(half.conv_in)
    _gather(vae.encoder.conv_out, gain=1 / SCALING, offset=SHIFT)
    vae.encoder.conv_out.bias[1] = -30.0  # log-variance: the posterior is a point
    _gather(vae.decoder.conv_out, gain=SCALING, offset=-SHIFT * SCALING)
    return vae.requires_grad_(False).eval()


def _silence_residuals(half: nn.Module) -> None:
    for name, parameter in half.named_parameters():
        if ".conv2." in name:
            parameter.zero_()


def _spread(convolution: nn.Conv2d) -> None:
    """Maps x to (x, -x, K, -K)."""
    assert convolution.bias is not None
    convolution.weight.zero_()
    convolution.weight[0, 0, 1, 1] = 1.0
    convolution.weight[1, 0, 1, 1] = -1.0
    convolution.bias.copy_(torch.tensor([0.0, 0.0, CONSTANT, -CONSTANT]))


def _gather(convolution: nn.Conv2d, *, gain: float, offset: float) -> None:
    """Undo `_spread`, the norm and SiLU, then map x to ``gain * x + offset``."""
    assert convolution.bias is not None
    convolution.weight.zero_()
    convolution.bias.zero_()
    # The four channels have variance (K^2 + mean(x^2)) / 2, and x about one third of 1.
    norm = ((CONSTANT**2 + 0.5) / 2) ** 0.5
    convolution.weight[0, 0, 1, 1] = gain * norm
    convolution.weight[0, 1, 1, 1] = -gain * norm
    convolution.bias[0] = offset
