"""Writes Python code that samples a recipe's model and an exported adapter with plain diffusers.

The code takes the evaluation's steps from the noise of its first sample. A pipeline's own sigmas
differ, and its scheduler would shift ours again, so the code sets a scheduler that does not.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from digenrl.evaluation.sampler import noise_seed
from digenrl.evaluation.settings import as_evaluated
from digenrl.report.export import networks_in
from shared.diffusion.policy import sampling_plan
from shared.models.catalogue import find_family, text_tokens
from shared.models.families import EXPERTS
from shared.models.lora_files import FILES
from shared.recipe.networks import negative_prompt, no_negative
from shared.recipe.recipe import Recipe
from shared.recipe.tables import Model

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SIGMAS_PER_LINE = 8
QWEN_EDIT = "QwenImageEditPipeline"


def base_model(model: Model) -> str:
    """Return the model's name on the hub if it is known, otherwise the folder's name."""
    if model.id is not None:
        return model.id
    name = _read(model.folder / "model_index.json").get("_name_or_path")
    is_hub_name = isinstance(name, str) and _HUB_NAME.fullmatch(name) and not Path(name).exists()
    return str(name) if is_hub_name else model.name


def makes_videos(model: Model) -> bool:
    return find_family(model.folder).makes_videos


def usage(recipe: Recipe, prompt: str, negative: str | None = None) -> str:
    """Write code that loads the adapter from its own folder and samples ``prompt``. For the first
    prompt of the evaluation, in float32, it reproduces the evaluation's first sample."""
    model = as_evaluated(recipe).model
    sigmas = sampling_plan(as_evaluated(recipe), window_start=None).sigmas[:-1]
    arguments = {
        "num_inference_steps": "len(sigmas)",
        **_sizes(model),
        **_conditioning(model),
        "generator": f"torch.Generator().manual_seed({noise_seed(recipe.evaluation.seed, 0, 0)})",
    }
    family = find_family(model.folder)
    arguments |= _negative(recipe, negative)
    if family.takes_image:
        arguments = {"image": 'Image.open("source.png")', **arguments, **_unscaled(model)}
    if takes_sigmas := family.takes_sigmas:
        arguments["sigmas"] = "sigmas"
    variable, result = ("video", "frames[0]") if makes_videos(model) else ("image", "images[0]")
    base = base_model(model)
    where = "" if "/" in base else "  # the base model's folder"
    return "\n".join([
        *([] if takes_sigmas else ["from functools import partial", ""]),
        "import torch",
        *(["from PIL import Image"] if family.takes_image else []),
        "from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler",
        "",
        f"pipeline = DiffusionPipeline.from_pretrained("
        f"{json.dumps(base)}, dtype=torch.{model.dtype}){where}",
        *_loading(recipe),
        "sigmas = [",
        *_lines(sigmas),
        "]  # as they are: this scheduler does not shift them",
        "pipeline.scheduler = FlowMatchEulerDiscreteScheduler()",
        *([] if takes_sigmas else [_GIVEN]),
        *_settings(model),
        f"{variable} = pipeline(",
        f"    prompt={json.dumps(prompt, ensure_ascii=False)},",
        *(f"    {name}={value}," for name, value in arguments.items()),
        f").{result}",
    ])  # fmt: skip


def _loading(recipe: Recipe) -> Iterator[str]:
    """Yield the lines that load the adapters of all networks that have one."""
    where = "  # this folder, or the repository that it is in"
    if (
        "guider" in find_family(recipe.model.folder).components
    ):  # diffusers' class loads none itself
        file = json.dumps(FILES[EXPERTS["high"]])
        yield f'pipeline.transformer.load_lora_adapter(".", weight_name={file}){where}'
        return
    networks, trained = networks_in(recipe.model.folder), recipe.model.lora.experts
    if len(networks) == 1:
        yield f'pipeline.load_lora_weights("."){where}'
        return
    for side, network in EXPERTS.items():
        if trained in ("both", side):
            second = ", load_into_transformer_2=True" if side == "low" else ""
            file = json.dumps(FILES[network])
            yield f'pipeline.load_lora_weights(".", weight_name={file}{second}){where}'
            where = ""


_GIVEN = (
    "pipeline.scheduler.set_timesteps = partial(pipeline.scheduler.set_timesteps, sigmas=sigmas)"
)
"""Code for a pipeline that has no argument for sigmas."""


def _lines(sigmas: Sequence[float]) -> Iterator[str]:
    for first in range(0, len(sigmas), _SIGMAS_PER_LINE):
        numbers = sigmas[first : first + _SIGMAS_PER_LINE]
        yield "    " + " ".join(f"{number!r}," for number in numbers)


def _unscaled(model: Model) -> dict[str, str]:
    """Return the arguments by which a pipeline leaves the source image, of the samples' size, as it
    is, and makes samples of that size."""
    if find_family(model.folder).pipeline != "FluxKontextPipeline":
        return {}
    return {"max_area": str(model.height * model.width), "_auto_resize": "False"}


def _sizes(model: Model) -> dict[str, int]:
    sizes = {"height": model.height, "width": model.width}
    return sizes | {"num_frames": model.frames} if makes_videos(model) else sizes


def _conditioning(model: Model) -> dict[str, object]:
    """Returns the guidance and the length of a prompt in training, as the pipeline takes them."""
    family, tokens = find_family(model.folder), text_tokens(model.folder, model.text_tokens)
    if family.text_tokenizer is not None:
        tokenizer = _read(model.folder / family.text_tokenizer / "tokenizer_config.json")
        tokens = min(tokens, int(tokenizer.get("model_max_length", tokens)))
    if "guider" in family.components:
        return {}
    if family.pipeline == QWEN_EDIT:  # takes a prompt of any length
        return {**family.guidance_arguments(model.guidance)}
    second = {} if model.guidance_2 is None else {"guidance_scale_2": model.guidance_2}
    return {
        **family.guidance_arguments(model.guidance), **second, "max_sequence_length": tokens,
    }  # fmt: skip


def _negative(recipe: Recipe, own: str | None) -> dict[str, object]:
    """Return the negative prompt as the pipeline takes it, where it has another than none."""
    model, text = recipe.model, negative_prompt(recipe) if own is None else own
    if not text or no_negative(recipe):
        return {}
    value = json.dumps(text, ensure_ascii=False)
    if find_family(model.folder).pipeline == "Flux2KleinPipeline":  # takes its embedding alone
        tokens = text_tokens(model.folder, model.text_tokens)
        value = f"pipeline.encode_prompt({value}, max_sequence_length={tokens})[0]"
        return {"negative_prompt_embeds": value}
    return {"negative_prompt": value}


def _settings(model: Model) -> Iterator[str]:
    """Yield the lines that give a pipeline guidance, length of a prompt and size of the source
    image, where its call does not take them."""
    if "guider" in find_family(model.folder).components:
        yield f"pipeline.guider = pipeline.guider.new(guidance_scale={model.guidance})"
        yield f"pipeline.tokenizer_max_length = {text_tokens(model.folder, model.text_tokens)}"
    if find_family(model.folder).pipeline == QWEN_EDIT:
        size = f"({model.width}, {model.height}, None)"
        yield "from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit"
        yield f"pipeline_qwenimage_edit.calculate_dimensions = lambda area, ratio: {size}"


def _read(path: Path) -> dict[str, Any]:
    """Read a JSON file; a missing file gives an empty dict."""
    config: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return config
