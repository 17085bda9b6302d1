"""All that is known of a model family without torch: `FamilySpec`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shared.errors import UserError
from shared.models.native_layers import NativeLayers
from shared.models.sigmas import Config, SigmaRule

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors, by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec:
    """Describes one family. Defaults of fields fit most families."""

    pipeline: str
    """Name of its pipeline class in diffusers, as in ``model_index.json``."""
    adapter: str
    """Import string, ``module:Class``, of its adapter in `shared.diffusion.families`."""
    components: frozenset[str]
    """Parts of a folder that the adapter uses besides network, noise schedule and decoder."""
    network_keys: frozenset[str]
    """Keys of the network's configuration that the adapter knows. Any other is a switch that has
    to be off, null or false, such as `image_dim` (image-to-video) and `zero_cond_t` (editing)."""
    has_experts: bool = False
    """Whether a folder may hold a second network, for low noise (`EXPERTS`)."""
    names_attention: bool = True
    """Whether the network's attention goes by `model.attention`; diffusers' SD3 asks torch's own
    directly."""
    sigmas: SigmaRule
    """Noise schedule that its pipeline uses."""
    packed: bool = False
    """Whether the network takes tokens of 2 x 2 latents, which the adapter packs."""
    decoder_factor: Callable[[Config], int]
    """Returns pixels per latent, each way, from the decoder's configuration."""
    frame_factor: Callable[[Config], int] | None = None
    """Returns frames of video per frame of latents after the first; None if it makes images."""
    max_tokens_per_side: Callable[[Config], int | None] = lambda network: None
    """Returns the number of learned positions each way, from the network's configuration; None if
    any size will do."""
    text_tokens: int
    """Length of its longest prompt by default: longer ones are cut off."""
    max_text_tokens: int
    """Longest prompt that its pipeline takes."""
    text_tokenizer: str | None = None
    """Tokenizer of the folder whose own limit also truncates a prompt, if any."""
    condition_shapes: Callable[[Config, int], Shapes]
    """Return the shapes, without rows, of the adapter's conditions for a prompt of this many
    tokens, from the network's configuration. They have the network's type."""
    image_shapes: Callable[[Config, tuple[int, ...]], Shapes] | None = None
    """Returns the shapes, without rows, of what its adapter encodes a source image to, from the
    network's configuration and the shape of a sample's latents; None if its prompts have no source
    image."""
    embeds_guidance: bool = False
    """Whether the network takes guidance as an input, so that one forward pass is enough."""
    guidance_arguments: Callable[[float], Mapping[str, object]] = lambda guidance: {
        "guidance_scale": guidance
    }
    """Returns the arguments by which its pipeline is given a guidance, as Python writes them."""
    negative_prompt: str = ""
    """Negative prompt that its authors sample with, where it has classifier-free guidance."""
    takes_sigmas: bool = True
    """Whether its pipeline has an argument for sigmas."""
    lora_targets: tuple[str, ...]
    """Suffixes of the names of the layers that LoRA adapts by default."""
    native_layers: NativeLayers
    """Names of its layers in Kohya's and ComfyUI's LoRA files; `SAME` if they are diffusers'."""

    @property
    def takes_image(self) -> bool:
        """Whether every prompt has a source image, which its samples edit or begin with."""
        return self.image_shapes is not None

    @property
    def makes_videos(self) -> bool:
        return self.frame_factor is not None

    def forwards(self, guidance: float) -> int:
        """Returns rows of the network per sample: 2 with classifier-free guidance."""
        return 2 if guidance > 1 and not self.embeds_guidance else 1

    def pixels_per_token(self, network: Config, decoder: Config) -> int:
        """Returns the pixels of a token each way: height and width are multiples of it."""
        return self._patch(network)[1] * self.decoder_factor(decoder)

    def num_tokens(
        self, network: Config, decoder: Config, *, height: int, width: int, frames: int
    ) -> int:
        side = self.pixels_per_token(network, decoder)
        latent_frames = self._latent_frames(decoder, frames)
        return latent_frames // self._patch(network)[0] * (height // side) * (width // side)

    def latent_shape(
        self, network: Config, decoder: Config, *, height: int, width: int, frames: int
    ) -> tuple[int, ...]:
        """Returns the shape of one sample's latents: (C, h, w), or (C, F, h, w) of a video.

        Raises:
            UserError: if the model cannot make samples of that size.
        """
        self.check_size("model", network, decoder, height=height, width=width)
        factor, channels = self.decoder_factor(decoder), network["in_channels"]
        if self.packed:
            channels //= 4
        elif network.get("out_channels"):  # those of the state; an image has inputs besides
            channels = network["out_channels"]
        size = (height // factor, width // factor)
        if not self.makes_videos:
            return (channels, *size)
        return (channels, self._latent_frames(decoder, frames), *size)

    def check_size(
        self, table: str, network: Config, decoder: Config, *, height: int, width: int
    ) -> None:
        """Raises UserError, which names the key of ``table``, unless the model makes samples of
        ``height`` x ``width`` pixels."""
        multiple = self.pixels_per_token(network, decoder)
        tokens = self.max_tokens_per_side(network)
        for name, size in (("height", height), ("width", width)):
            if size % multiple:
                nearest = max(multiple, round(size / multiple) * multiple)
                raise UserError(
                    f"{table}.{name}: {size} is not a multiple of {multiple}; nearest is {nearest}"
                )
            if tokens is not None and size > tokens * multiple:
                raise UserError(
                    f"{table}.{name}: {size} is more than this model knows; at most "
                    f"{tokens * multiple}"
                )

    def _patch(self, network: Config) -> tuple[int, int]:
        """Returns the latents of a token: along time, and each way in a frame."""
        if self.packed:
            return 1, 2
        if "all_patch_size" in network:
            return network["all_f_patch_size"][0], network["all_patch_size"][0]
        patch = network["patch_size"]
        if isinstance(patch, int):
            return network.get("patch_size_t", 1), patch
        return patch[0], patch[1]  # (frames, rows, columns)

    def _latent_frames(self, decoder: Config, frames: int) -> int:
        """Raises UserError if the decoder makes no video of this many frames."""
        if self.frame_factor is None:
            return 1
        factor = self.frame_factor(decoder)
        if (frames - 1) % factor:
            below = (frames - 1) // factor * factor + 1
            raise UserError(
                f"model.frames: {frames} is not a multiple of {factor} plus 1; the nearest are "
                f"{below} and {below + factor}"
            )
        return (frames - 1) // factor + 1
