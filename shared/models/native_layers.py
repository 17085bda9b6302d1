"""Names of a network's layers in the checkpoint that its authors have published.

Kohya's trainers and ComfyUI name a LoRA's layers so. "{}" is the number of a block. A layer that
stands for several of diffusers' holds their rows one after the other, in the order that is given.
"""

from collections.abc import Iterable, Mapping

NativeLayers = Mapping[str, tuple[str, ...]]
"""Native name -> names in diffusers. Where a layer has two native names, ComfyUI's is the first."""

_QKV = ("to_q", "to_k", "to_v")
_ADDED_QKV = ("add_q_proj", "add_k_proj", "add_v_proj")
_MLP = ("net.0.proj", "net.2")


def _in(block: str, layers: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{block}.{layer}" for layer in layers)


_DOUBLE, _SINGLE = "transformer_blocks.{}", "single_transformer_blocks.{}"

_JOINT: NativeLayers = {
    "double_blocks.{}.img_attn.qkv": _in(f"{_DOUBLE}.attn", _QKV),
    "double_blocks.{}.img_attn.proj": (f"{_DOUBLE}.attn.to_out.0",),
    "double_blocks.{}.txt_attn.qkv": _in(f"{_DOUBLE}.attn", _ADDED_QKV),
    "double_blocks.{}.txt_attn.proj": (f"{_DOUBLE}.attn.to_add_out",),
    "double_blocks.{}.img_mlp.0": (f"{_DOUBLE}.ff.{_MLP[0]}",),
    "double_blocks.{}.img_mlp.2": (f"{_DOUBLE}.ff.{_MLP[1]}",),
    "double_blocks.{}.txt_mlp.0": (f"{_DOUBLE}.ff_context.{_MLP[0]}",),
    "double_blocks.{}.txt_mlp.2": (f"{_DOUBLE}.ff_context.{_MLP[1]}",),
    "double_blocks.{}.img_mod.lin": (f"{_DOUBLE}.norm1.linear",),
    "double_blocks.{}.txt_mod.lin": (f"{_DOUBLE}.norm1_context.linear",),
    "single_blocks.{}.linear1": (*_in(f"{_SINGLE}.attn", _QKV), f"{_SINGLE}.proj_mlp"),
    "single_blocks.{}.linear2": (f"{_SINGLE}.proj_out",),
    "single_blocks.{}.modulation.lin": (f"{_SINGLE}.norm.linear",),
}
"""Blocks of FLUX.1, which HunyuanVideo has as well."""

FLUX: NativeLayers = {
    **_JOINT,
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    "final_layer.linear": ("proj_out",),
}

FLUX2: NativeLayers = {
    **{name: parts for name, parts in _JOINT.items() if "attn" in name},
    "double_blocks.{}.img_mlp.0": (f"{_DOUBLE}.ff.linear_in",),
    "double_blocks.{}.img_mlp.2": (f"{_DOUBLE}.ff.linear_out",),
    "double_blocks.{}.txt_mlp.0": (f"{_DOUBLE}.ff_context.linear_in",),
    "double_blocks.{}.txt_mlp.2": (f"{_DOUBLE}.ff_context.linear_out",),
    "single_blocks.{}.linear1": (f"{_SINGLE}.attn.to_qkv_mlp_proj",),
    "single_blocks.{}.linear2": (f"{_SINGLE}.attn.to_out",),
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_guidance_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_guidance_embed.timestep_embedder.linear_2",),
    "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
    "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
    "single_stream_modulation.lin": ("single_stream_modulation.linear",),
    "final_layer.linear": ("proj_out",),
}

HUNYUAN_VIDEO: NativeLayers = {
    **_JOINT,
    "double_blocks.{}.img_mlp.fc1": _JOINT["double_blocks.{}.img_mlp.0"],
    "double_blocks.{}.img_mlp.fc2": _JOINT["double_blocks.{}.img_mlp.2"],
    "double_blocks.{}.txt_mlp.fc1": _JOINT["double_blocks.{}.txt_mlp.0"],
    "double_blocks.{}.txt_mlp.fc2": _JOINT["double_blocks.{}.txt_mlp.2"],
    "double_blocks.{}.img_mod.linear": _JOINT["double_blocks.{}.img_mod.lin"],
    "double_blocks.{}.txt_mod.linear": _JOINT["double_blocks.{}.txt_mod.lin"],
    "single_blocks.{}.modulation.linear": _JOINT["single_blocks.{}.modulation.lin"],
    "double_blocks.{}.img_attn_qkv": _JOINT["double_blocks.{}.img_attn.qkv"],
    "double_blocks.{}.img_attn_proj": _JOINT["double_blocks.{}.img_attn.proj"],
    "double_blocks.{}.txt_attn_qkv": _JOINT["double_blocks.{}.txt_attn.qkv"],
    "double_blocks.{}.txt_attn_proj": _JOINT["double_blocks.{}.txt_attn.proj"],
}
"""The first names follow ComfyUI, the others the authors' own code."""

HUNYUAN_VIDEO_15: NativeLayers = {
    **{
        name: parts
        for name, parts in HUNYUAN_VIDEO.items()
        if name.startswith("double") and "attn_qkv" not in name
    },
    **{
        f"double_blocks.{{}}.{side}_attn_{letter}": (f"{_DOUBLE}.attn.{layer}",)
        for side, layers in (("img", _QKV), ("txt", _ADDED_QKV))
        for letter, layer in zip("qkv", layers, strict=True)
    },
}
"""The first names follow ComfyUI, the others the authors' own code."""

SD3: NativeLayers = {
    "joint_blocks.{}.x_block.attn.qkv": _in(f"{_DOUBLE}.attn", _QKV),
    "joint_blocks.{}.x_block.attn.proj": (f"{_DOUBLE}.attn.to_out.0",),
    "joint_blocks.{}.x_block.attn2.qkv": _in(f"{_DOUBLE}.attn2", _QKV),
    "joint_blocks.{}.x_block.attn2.proj": (f"{_DOUBLE}.attn2.to_out.0",),
    "joint_blocks.{}.x_block.mlp.fc1": (f"{_DOUBLE}.ff.{_MLP[0]}",),
    "joint_blocks.{}.x_block.mlp.fc2": (f"{_DOUBLE}.ff.{_MLP[1]}",),
    "joint_blocks.{}.context_block.attn.qkv": _in(f"{_DOUBLE}.attn", _ADDED_QKV),
    "joint_blocks.{}.context_block.attn.proj": (f"{_DOUBLE}.attn.to_add_out",),
    "joint_blocks.{}.context_block.mlp.fc1": (f"{_DOUBLE}.ff_context.{_MLP[0]}",),
    "joint_blocks.{}.context_block.mlp.fc2": (f"{_DOUBLE}.ff_context.{_MLP[1]}",),
    "context_embedder": ("context_embedder",),
}

WAN: NativeLayers = {
    **{
        f"blocks.{{}}.{theirs}.{letter}": (f"blocks.{{}}.{ours}.{layer}",)
        for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for letter, layer in zip("qkvo", (*_QKV, "to_out.0"), strict=True)
    },
    "blocks.{}.ffn.0": (f"blocks.{{}}.ffn.{_MLP[0]}",),
    "blocks.{}.ffn.2": (f"blocks.{{}}.ffn.{_MLP[1]}",),
    "text_embedding.0": ("condition_embedder.text_embedder.linear_1",),
    "text_embedding.2": ("condition_embedder.text_embedder.linear_2",),
    "time_embedding.0": ("condition_embedder.time_embedder.linear_1",),
    "time_embedding.2": ("condition_embedder.time_embedder.linear_2",),
    "time_projection.1": ("condition_embedder.time_proj",),
    "head.head": ("proj_out",),
}

Z_IMAGE: NativeLayers = {
    name: parts
    for blocks in ("layers.{}", "noise_refiner.{}", "context_refiner.{}")
    for name, parts in {
        f"{blocks}.attention.qkv": _in(f"{blocks}.attention", _QKV),
        f"{blocks}.attention.out": (f"{blocks}.attention.to_out.0",),
        **{f"{blocks}.feed_forward.w{n}": (f"{blocks}.feed_forward.w{n}",) for n in (1, 2, 3)},
    }.items()
}

SAME: NativeLayers = {}
"""The layers of the published checkpoint have diffusers' names."""
