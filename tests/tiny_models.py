"""Small random models of every family, as diffusers folders: what the real ones are loaded by."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from digenrl.digits.text import (
    CLIP_WIDTH,
    T5_WIDTH,
    build_text_parts,
    clip_encoder,
    clip_tokenizer,
    randomized,
    t5_encoder,
    t5_tokenizer,
)
from digenrl.profile.models import ARCHITECTURES, ModelName
from shared.diffusion.families.base import pack, unpack
from shared.models.families import FAMILIES as FAMILIES_BY_PIPELINE
from tests import tiny_ltx2

FAMILIES = ("sd3", "flux", "qwen-image", "wan", "hunyuan-video")
OTHERS = (
    "sd3-large", "wan-small", "wan22", "flux2", "flux2-klein", "z-image", "hunyuan-video15",
    "flux-kontext", "ltx2",
)  # fmt: skip
"""Models of a family that are not shaped like its first: no dual attention, other heads, two
networks; and families that only the slow tests go through."""
MODELS = (*FAMILIES, *OTHERS)
EDITS = ("flux-kontext",)
"""Models that edit an image."""
PACKED = ("flux", "qwen-image", "flux-kontext")
VIDEO = ("wan", "hunyuan-video", "wan-small", "wan22", "hunyuan-video15", "ltx2")
CFG = (
    "sd3",
    "qwen-image",
    "wan",
    *(name for name in OTHERS if name not in ("flux2", "flux-kontext")),
)
"""Models that take their guidance as a second half of the batch."""
BOUNDARY = 0.85
CLIP_TOKENS = 77
PROMPT = "a handwritten five"


def build(family: str, seed: int = 0) -> Any:
    """A whole pipeline, frozen and without progress bars."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = _BUILDERS[family]()
    pipeline.set_progress_bar_config(disable=True)
    for module in pipeline.components.values():
        if isinstance(module, torch.nn.Module):
            module.requires_grad_(False).eval()
    return pipeline


def save(family: str, folder: Path, seed: int = 0) -> Path:
    build(family, seed).save_pretrained(folder)
    return folder


def run(
    family: str,
    pipeline: Any,
    start: torch.Tensor,
    *,
    guidance: float,
    output: str,
    height: int,
    width: int,
    frames: int,
    steps: int,
    guidance_2: float | None = None,
) -> torch.Tensor:
    """What diffusers makes of the noise ``start`` (B, ...): latents, or pixels in [0, 1]."""
    call = _guidance(family, pipeline, guidance)
    if guidance_2 is not None:
        call["guidance_scale_2"] = guidance_2
    if family in ("sd3", "sd3-large"):
        call["max_sequence_length"] = pipeline.tokenizer_3.model_max_length
    if family in VIDEO:
        call["num_frames"] = frames
    if family in EDITS:
        call |= {"image": picture(height, width), **_UNSCALED.get(family, _nothing)(height, width)}
    noise = pack(start) if family in PACKED else start.clone()
    if family == "ltx2":
        noise, call["audio_latents"] = tiny_ltx2.tokens(pipeline, start)
    result = pipeline(
        prompt=[PROMPT] * len(start), height=height, width=width, num_inference_steps=steps,
        output_type=output, latents=noise, **call,
    )  # fmt: skip
    found = torch.as_tensor(result.frames if family in VIDEO else result.images)
    if family == "ltx2" and output == "latent":
        return tiny_ltx2.joined(pipeline, found, result.audio, start)
    return _unpacked(family, pipeline, found, start) if output == "latent" else found


def _guidance(family: str, pipeline: Any, guidance: float) -> dict[str, Any]:
    """The arguments by which a pipeline is given a guidance."""
    if family == "qwen-image":
        return {"true_cfg_scale": guidance, "negative_prompt": ""}
    if family == "hunyuan-video15":
        pipeline.guider = pipeline.guider.new(guidance_scale=guidance)
        return {}
    if family == "ltx2":
        return dict(FAMILIES_BY_PIPELINE[type(pipeline).__name__].guidance_arguments(guidance))
    return {"guidance_scale": guidance - 1 if family == "z-image" else guidance}


def _unpacked(
    family: str, pipeline: Any, latents: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """The pipeline's latents in the shape of ``start``."""
    if family in PACKED:
        return unpack(latents, *start.shape[-2:])
    if family == "flux2":
        return latents.transpose(1, 2).reshape(start.shape)
    if family == "flux2-klein":
        return _as_the_network_s(pipeline, latents)
    return latents


def _nothing(height: int, width: int) -> dict[str, Any]:
    return {}


_UNSCALED: Mapping[str, Callable[[int, int], dict[str, Any]]] = {
    "flux-kontext": lambda height, width: {"max_area": height * width, "_auto_resize": False},
}
"""Arguments by which a pipeline leaves the picture at its size."""


def picture(height: int, width: int) -> Any:
    """A source image."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def source(family: str, height: int, width: int) -> torch.Tensor | None:
    """What a model of the family is given of it: (1, 3, H, W); None if it edits no image."""
    if family not in EDITS:
        return None
    return torch.from_numpy(np.asarray(picture(height, width)).copy()).permute(2, 0, 1)[None]


def encoded(family: str, model: Any, guidance: float, size: int, prompt: str = PROMPT) -> Any:
    """Conditions of the prompt, and of the picture where one is edited, of a square sample."""
    return model.encode(prompt, guidance=guidance, image=source(family, size, size))


def _as_the_network_s(pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
    """Undoes what FLUX.2's pipeline does to latents before it decodes them."""
    norm = pipeline.vae.bn
    deviation = torch.sqrt(norm.running_var + pipeline.vae.config.batch_norm_eps)
    mean, deviation = (each.view(1, -1, 1, 1) for each in (norm.running_mean, deviation))
    found: torch.Tensor = (pipeline._patchify_latents(latents) - mean) / deviation
    return found


def pixels_per_token(family: str, pipeline: Any) -> int:
    """What diffusers' own pipeline multiplies."""
    if family in PACKED or family == "z-image":
        return int(2 * pipeline.vae_scale_factor)
    patch = pipeline.transformer.config.patch_size
    return int(_decoder_factor(family, pipeline) * (patch if isinstance(patch, int) else patch[1]))


def latent_shape(
    family: str, pipeline: Any, height: int, width: int, frames: int
) -> tuple[int, ...]:
    """Shape of the latents that diffusers' own pipeline draws for one sample, unpacked."""
    channels, factor = pipeline.transformer.config.in_channels, _decoder_factor(family, pipeline)
    if family == "hunyuan-video15":
        channels = pipeline.num_channels_latents
    size = (height // factor, width // factor)
    if family == "ltx2":
        return tiny_ltx2.latent_shape(pipeline, *size, frames)
    if family in VIDEO:
        return (channels, (frames - 1) // pipeline.vae_scale_factor_temporal + 1, *size)
    return (channels // 4 if family in PACKED else channels, *size)


def _decoder_factor(family: str, pipeline: Any) -> int:
    name = "vae_scale_factor_spatial" if family in VIDEO else "vae_scale_factor"
    if family == "ltx2":
        name = "vae_spatial_compression_ratio"
    return int(getattr(pipeline, name)) * (2 if family.startswith("flux2") else 1)


def _network(name: ModelName, **changes: Any) -> Any:
    import diffusers

    tiny = ARCHITECTURES[name].tiny()
    return getattr(diffusers, tiny.network)(**{**tiny.config, **changes})


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _image_decoder() -> Any:
    from diffusers import AutoencoderKL

    blocks = 4
    return AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=16, norm_num_groups=2,
        block_out_channels=(4,) * blocks, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        scaling_factor=0.3611, shift_factor=0.1159,
        use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip


def _sd3(**network: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

    return StableDiffusion3Pipeline(
        transformer=_network(
            ModelName.sd35_medium, pooled_projection_dim=2 * CLIP_WIDTH, **network
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_image_decoder(),
        **build_text_parts(seed=1),
    )


def _flux(pipeline: str = "FluxPipeline") -> Any:
    import diffusers
    from diffusers import FlowMatchEulerDiscreteScheduler
    from transformers import CLIPTextModel

    clip, t5 = clip_tokenizer(CLIP_TOKENS), t5_tokenizer()
    return getattr(diffusers, pipeline)(
        transformer=_network(ModelName.flux1_dev),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        vae=_image_decoder(),
        tokenizer=clip,
        text_encoder=_without_projection(CLIPTextModel, clip),
        tokenizer_2=t5,
        text_encoder_2=t5_encoder(t5, _generator()),
    )


def _without_projection(cls: Any, tokenizer: Any) -> Any:
    """The CLIP text encoder that gives its pooled state as it is."""
    config = clip_encoder(tokenizer, _generator()).config
    return randomized(cls(config), _generator())


def _qwen_image() -> Any:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
    )
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = _byte_tokenizer("Qwen2Tokenizer", "<|endoftext|>")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2_5_VLConfig(
        text_config={
            **heads, "vocab_size": len(tokenizer), "hidden_size": T5_WIDTH, "num_hidden_layers": 1,
            "intermediate_size": T5_WIDTH, "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3],
            },
        },
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
            "out_hidden_size": T5_WIDTH, "fullatt_block_indexes": [0],
        },
    )  # fmt: skip
    encoder = randomized(Qwen2_5_VLForConditionalGeneration(config), _generator())
    return QwenImagePipeline(
        transformer=_network(ModelName.qwen_image, num_layers=2),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        vae=AutoencoderKLQwenImage(base_dim=4, z_dim=16, num_res_blocks=1),
        tokenizer=tokenizer,
        text_encoder=encoder,
    )  # fmt: skip


def _flux2() -> Any:
    from diffusers import Flux2Pipeline
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    tokenizer = _byte_tokenizer("LlamaTokenizerFast", "</s>")
    tokenizer.chat_template = (
        "{% for each in messages %}{{ each['content'][0]['text'][:40] }}{% endfor %}"
    )
    heads = {"num_attention_heads": 2, "head_dim": 8, "num_hidden_layers": 31}
    config = Mistral3Config(
        text_config={
            "model_type": "mistral", **heads, "vocab_size": len(tokenizer), "hidden_size": 16,
            "intermediate_size": 16, "num_key_value_heads": 1, "max_position_embeddings": 1024,
        },
        vision_config={
            "model_type": "pixtral", **heads, "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "image_size": 28, "patch_size": 14,
        },
    )  # fmt: skip
    encoder = randomized(Mistral3ForConditionalGeneration(config), _generator())
    return Flux2Pipeline(**_flux2_parts(), tokenizer=tokenizer, text_encoder=encoder)


def _flux2_klein() -> Any:
    from diffusers import Flux2KleinPipeline
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _byte_tokenizer("Qwen2Tokenizer", "<|endoftext|>")
    tokenizer.chat_template = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
    width = 16
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=width,
        num_hidden_layers=28, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        max_position_embeddings=1024, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    encoder = randomized(Qwen3ForCausalLM(config), _generator())
    return Flux2KleinPipeline(
        **_flux2_parts(guidance_embeds=False), tokenizer=tokenizer, text_encoder=encoder
    )


def _flux2_parts(**network: Any) -> dict[str, Any]:
    """The network, for texts of three layers 16 wide, the decoder and the noise schedule."""
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2Transformer2DModel,
    )

    blocks = 4
    vae = AutoencoderKLFlux2(
        latent_channels=4, norm_num_groups=2, block_out_channels=(4,) * blocks, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
    )  # fmt: skip
    vae.bn.running_mean.normal_(std=0.1)
    vae.bn.running_var.uniform_(0.5, 1.5)
    return {
        "transformer": Flux2Transformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=48, timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4), **network,
        ),
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        "vae": vae,
    }  # fmt: skip


def _z_image() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
    from transformers import Qwen3Config, Qwen3Model

    tokenizer = _byte_tokenizer("Qwen2Tokenizer", "<|endoftext|>")
    tokenizer.chat_template = "{% for each in messages %}<{{ each['content'] }}>{% endfor %}"
    width = 16
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=width,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        max_position_embeddings=1024, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    network = ZImageTransformer2DModel(
        dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=width,
        axes_dims=[4, 6, 6], axes_lens=[1024, 64, 64],
    )  # fmt: skip
    return ZImagePipeline(
        transformer=randomized(network, _generator()),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_image_decoder(),
        tokenizer=tokenizer,
        text_encoder=randomized(Qwen3Model(config), _generator()),
    )


def _wan(*, experts: bool = False, **network: Any) -> Any:
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline
    from transformers import UMT5Config, UMT5EncoderModel

    tokenizer = t5_tokenizer()
    config = UMT5Config(
        vocab_size=len(tokenizer), d_model=T5_WIDTH, d_kv=8, d_ff=2 * T5_WIDTH, num_layers=1,
        num_heads=4, dropout_rate=0.0, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    second = {"transformer_2": _network(ModelName.wan21_14b), "boundary_ratio": BOUNDARY}
    return WanPipeline(
        transformer=_network(ModelName.wan21_14b, **network),
        **(second if experts else {}),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderKLWan(base_dim=4, z_dim=16, num_res_blocks=1),
        tokenizer=tokenizer,
        text_encoder=randomized(UMT5EncoderModel(config), _generator()),
    )


def _hunyuan_video() -> Any:
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
    )
    from transformers import CLIPTextModel, LlamaConfig, LlamaModel

    tokenizer, clip = _byte_tokenizer("LlamaTokenizerFast", "</s>"), clip_tokenizer(CLIP_TOKENS)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=T5_WIDTH, intermediate_size=T5_WIDTH,
        num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return HunyuanVideoPipeline(
        transformer=_network(ModelName.hunyuanvideo),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=AutoencoderKLHunyuanVideo(
            latent_channels=16, block_out_channels=(4, 4, 4, 4), layers_per_block=1,
            norm_num_groups=2,
        ),
        tokenizer=tokenizer,
        text_encoder=randomized(LlamaModel(config), _generator()),
        tokenizer_2=clip,
        text_encoder_2=_without_projection(CLIPTextModel, clip),
    )  # fmt: skip


def _hunyuan_video15() -> Any:
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15Pipeline,
        HunyuanVideo15Transformer3DModel,
    )
    from transformers import (
        ByT5Tokenizer,
        Qwen2_5_VLTextConfig,
        Qwen2_5_VLTextModel,
        T5Config,
        T5EncoderModel,
    )

    tokenizer, letters = _byte_tokenizer("Qwen2Tokenizer", "<|endoftext|>"), ByT5Tokenizer()
    tokenizer.chat_template = "{% for each in messages %}{{ each['content'][:120] }}{% endfor %}:"
    width = 16
    encoder = Qwen2_5_VLTextConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=width,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=2048, pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    )  # fmt: skip
    glyphs = T5Config(
        vocab_size=len(letters), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2,
        dropout_rate=0.0, pad_token_id=letters.pad_token_id,
    )  # fmt: skip
    network = HunyuanVideo15Transformer3DModel(
        in_channels=9, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_refiner_layers=1, mlp_ratio=2.0, text_embed_dim=width, text_embed_2_dim=8,
        image_embed_dim=8, rope_axes_dim=(4, 6, 6), task_type="t2v",
    )  # fmt: skip
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(4, 4, 8, 8, 8), layers_per_block=1
    )
    vae.enable_slicing()  # its attention takes one video at a time
    return HunyuanVideo15Pipeline(
        transformer=network,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        vae=vae,
        tokenizer=tokenizer,
        text_encoder=randomized(Qwen2_5_VLTextModel(encoder), _generator()),
        tokenizer_2=letters,
        text_encoder_2=randomized(T5EncoderModel(glyphs), _generator()),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    )


def _byte_tokenizer(cls: str, padding: str) -> Any:
    """A token for every byte."""
    import transformers
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), padding]
    return getattr(transformers, cls)(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        pad_token=padding,
        eos_token=padding,
        unk_token=padding,
    )


_BUILDERS: Mapping[str, Callable[[], Any]] = {
    "sd3": _sd3,
    "flux": _flux,
    "qwen-image": _qwen_image,
    "wan": _wan,
    "hunyuan-video": _hunyuan_video,
    "sd3-large": partial(_sd3, dual_attention_layers=(), num_layers=3),
    "wan-small": partial(_wan, num_attention_heads=3, num_layers=2),
    "wan22": partial(_wan, experts=True),
    "flux2": _flux2,
    "flux2-klein": _flux2_klein,
    "z-image": _z_image,
    "hunyuan-video15": _hunyuan_video15,
    "flux-kontext": partial(_flux, "FluxKontextPipeline"),
    "ltx2": lambda: tiny_ltx2.build(_byte_tokenizer("LlamaTokenizerFast", "</s>")),
}
