"""Compares the decoders' memory that the cost profiles have, which is traced, with what the
allocator gives out: at the profiles' sizes, with random weights."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import diffusers
import torch

from bench.full_size.model import DECODER
from bench.gpu_day.memory import Allocator, print_line
from bench.gpu_day.passes import tried
from bench.gpu_day.report import keep
from digenrl.trace.device_profile.ladder import timed
from services.scheduler.costs.profile import PROFILES, ProfileFile
from shared.diffusion.loading.device import own_device
from shared.diffusion.sampling.decoding import to_uint8

if TYPE_CHECKING:
    from bench.gpu_day.day import Day


Case = tuple[str, str, tuple[int, ...], Mapping[str, Any]]
"""Name of the profile; class of the decoder; shape of its latents at the profile's size; values of
the published configuration that are not the class's own."""
WAN: Case = ("wan2.1-14b", "AutoencoderKLWan", (1, 16, 9, 30, 52), {})
HUNYUAN: Case = ("hunyuanvideo", "AutoencoderKLHunyuanVideo", (1, 16, 14, 60, 60), {})
QWEN: Case = ("qwen-image", "AutoencoderKLQwenImage", (1, 16, 1, 64, 64), {})
SD35: Case = ("sd35-medium", "AutoencoderKL", (1, 16, 64, 64), DECODER)
TINY: Case = ("wan2.1-14b", "AutoencoderKLWan", (1, 16, 2, 5, 6), {"base_dim": 8})
TILED, WHOLE = True, False
CASES = (
    (WAN, WHOLE),
    (HUNYUAN, TILED),
    (HUNYUAN, WHOLE),
    (WAN, TILED),
    (QWEN, WHOLE),
    (SD35, WHOLE),
)


def measure(day: "Day") -> dict[str, Any]:
    """Returns traced and measured bytes by decoder, and the seconds of a sample."""
    found: dict[str, Any] = {}
    for case, tiles in ((TINY, WHOLE),) if day.tiny else CASES:
        name = case[0] + ", in tiles" * tiles
        print_line(name)
        found[name] = tried(partial(_measured, case, tiles))
        keep(day.folder, "decoders", found)
    return found


@torch.no_grad()
def _measured(case: Case, tiles: bool) -> dict[str, Any]:
    profile, decoder_class, shape, config = case
    allocator = Allocator(own_device())
    memory = ProfileFile.model_validate_json((PROFILES / f"{profile}.json").read_text()).memory
    assert memory is not None
    traced = 2**30 * (memory.tiled_gib if tiles else memory.decode_gib)
    with allocator.device:
        decoder = getattr(diffusers, decoder_class)(**config).eval()
        latents = torch.randn(shape)
    if tiles:
        decoder.enable_tiling()

    def decode() -> object:
        return to_uint8(decoder.decode(latents).sample)

    allocator.peak(decode)  # the first call of a shape is another one
    measured = allocator.peak(decode)
    return {
        "traced": traced, "measured": measured, "seconds": timed(allocator.device, decode),
        "factor": None if measured is None else measured / traced,
    }  # fmt: skip
