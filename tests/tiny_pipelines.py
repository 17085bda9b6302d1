"""Pipelines of small random networks, one of every kind that has an adapter, unsaved."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from bench.digits.text import (
    CLIP_WIDTH,
    T5_WIDTH,
    build_text_parts,
    clip_encoder,
    clip_tokenizer,
    randomized,
    t5_encoder,
    t5_tokenizer,
)
from digenrl.trace.device_profile.models import ARCHITECTURES, ModelName
from tests import tiny_ltx2

BOUNDARY = 0.85
"""Part of the noise below which Wan2.2's second network takes over."""
CLIP_TOKENS = 77


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


def _qwen_image(pipeline: str = "QwenImagePipeline", **parts: Callable[[Any], Any]) -> Any:
    """``parts`` are made of the tokenizer."""
    import diffusers
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = byte_tokenizer("Qwen2Tokenizer", "<|endoftext|>")
    signs: tuple[str, ...] = (
        ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>") if parts else ()
    )
    tokenizer.add_tokens(list(signs), special_tokens=True)
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
        **({"image_token_id": tokenizer.convert_tokens_to_ids(signs[-1])} if parts else {}),
    )  # fmt: skip
    encoder = randomized(Qwen2_5_VLForConditionalGeneration(config), _generator())
    return getattr(diffusers, pipeline)(
        transformer=_network(ModelName.qwen_image, num_layers=2),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        vae=AutoencoderKLQwenImage(base_dim=4, z_dim=16, num_res_blocks=1),
        tokenizer=tokenizer,
        text_encoder=encoder,
        **{name: build(tokenizer) for name, build in parts.items()},
    )  # fmt: skip


def _text_and_image(tokenizer: Any) -> Any:
    """Transformers' own processor, but for the part for videos, which needs torchvision."""
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor

    def save(self: Any, folder: str, **_: Any) -> None:
        self.image_processor.save_pretrained(folder)

    without_videos = type(
        "Qwen2VLProcessor",
        (Qwen2VLProcessor,),
        {
            "__module__": Qwen2VLProcessor.__module__, "save_pretrained": save,
            "check_argument_for_proper_class": lambda self, name, part: None,
        },
    )  # fmt: skip
    return without_videos(Qwen2VLImageProcessor(), tokenizer, None)


def _flux2() -> Any:
    from diffusers import Flux2Pipeline
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    tokenizer = byte_tokenizer("LlamaTokenizerFast", "</s>")
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

    tokenizer = byte_tokenizer("Qwen2Tokenizer", "<|endoftext|>")
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

    tokenizer = byte_tokenizer("Qwen2Tokenizer", "<|endoftext|>")
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
    second = {
        "transformer_2": _network(ModelName.wan21_14b, **network), "boundary_ratio": BOUNDARY,
    }  # fmt: skip
    return WanPipeline(
        transformer=_network(ModelName.wan21_14b, **network),
        **(second if experts else {}),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderKLWan(base_dim=4, z_dim=16, num_res_blocks=1),
        tokenizer=tokenizer,
        text_encoder=randomized(UMT5EncoderModel(config), _generator()),
    )


def _wan_from_image(*, experts: bool = False) -> Any:
    from diffusers import WanImageToVideoPipeline
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    width = 16
    config = CLIPVisionConfig(
        hidden_size=width, intermediate_size=width, num_hidden_layers=2, num_attention_heads=2,
        image_size=224, patch_size=14,
    )  # fmt: skip
    network = _network(ModelName.wan21_14b).config
    inner = network.num_attention_heads * network.attention_head_dim
    shapes: dict[str, Any] = {"in_channels": 36, "out_channels": 16}
    if experts:  # CLIP has no part in these
        plain = _wan(experts=True, **shapes)
        parts = {name: part for name, part in plain.components.items() if part is not None}
        return WanImageToVideoPipeline(**parts, boundary_ratio=BOUNDARY)
    plain = _wan(**shapes, image_dim=width, added_kv_proj_dim=inner)
    parts = {name: part for name, part in plain.components.items() if part is not None}
    return WanImageToVideoPipeline(
        **parts,
        image_encoder=randomized(CLIPVisionModel(config), _generator()),
        image_processor=CLIPImageProcessor(),
    )


def _hunyuan_video() -> Any:
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
    )
    from transformers import CLIPTextModel, LlamaConfig, LlamaModel

    tokenizer, clip = byte_tokenizer("LlamaTokenizerFast", "</s>"), clip_tokenizer(CLIP_TOKENS)
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

    tokenizer, letters = byte_tokenizer("Qwen2Tokenizer", "<|endoftext|>"), ByT5Tokenizer()
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


def byte_tokenizer(cls: str, padding: str) -> Any:
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


BUILDERS: Mapping[str, Callable[[], Any]] = {
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
    "qwen-image-edit": partial(_qwen_image, "QwenImageEditPipeline", processor=_text_and_image),
    "flux-kontext": partial(_flux, "FluxKontextPipeline"),
    "wan-i2v": _wan_from_image,
    "wan22-i2v": partial(_wan_from_image, experts=True),
    "ltx2": lambda: tiny_ltx2.build(byte_tokenizer("LlamaTokenizerFast", "</s>")),
}
