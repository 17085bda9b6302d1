"""HPSv3 and VideoAlign give what their authors' code gives for the same weights.

The reference is Qwen2-VL of transformers with the authors' forward pass: image embeddings put into
the text's, positions that only count, and a head at the reward's tokens.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from digenrl.hub.reward_weights import make_folder
from services.reward.scorers import hpsv3, video_align
from services.reward.scorers.qwen_reward import fit_size
from shared.errors import UserError
from tests.reward.tiny_scorers import DEVIATION, MEAN, images, scorer, shaken
from tests.tiny_pipelines import byte_tokenizer

CLOSE = 1e-5
WIDTH = 32
SIGNS = [
    "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
]  # fmt: skip
SMALL = 4 * 28 * 28
"""Pixels of an image in these tests."""
PROMPTS = ["a red square", "two", "a long sentence about {braces} and a cat"]


QUESTIONS = {"hpsv3": hpsv3.QUESTION, "video_align": video_align.QUESTION}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hpsv3, "PIXELS", SMALL)
    monkeypatch.setattr(hpsv3, "QUESTION", "Rate: {text_prompt} <|Reward|>\nEND\n")
    ratings = " END ".join(video_align.TOKENS)
    monkeypatch.setattr(video_align, "QUESTION", f"Rate {ratings} of {{text_prompt}}\n")
    monkeypatch.setattr(video_align, "MIN_PIXELS", SMALL)
    monkeypatch.setattr(video_align, "MAX_PIXELS", SMALL)


@pytest.fixture(scope="module")
def like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Qwen2-VL that both were trained from: its configuration and its tokenizer."""
    folder = tmp_path_factory.mktemp("qwen2-vl")
    tokenizer = tokenizer_of([])
    tokenizer.save_pretrained(folder)
    made = config(len(tokenizer)).to_dict()
    text, rope = made.pop("text_config"), {"type": "mrope", "mrope_section": [2, 3, 3]}
    flat = {**text, **made, "rope_theta": 1e4, "rope_scaling": rope}  # as the hub has it
    del flat["rope_parameters"], flat["layer_types"]
    (folder / "config.json").write_text(json.dumps(flat))
    return folder


def tokenizer_of(tokens: list[str]) -> Any:
    tokenizer = byte_tokenizer("Qwen2Tokenizer", "<|endoftext|>")
    tokenizer.add_tokens([*SIGNS, *tokens], special_tokens=True)
    return tokenizer


def config(words: int) -> Any:
    from transformers import Qwen2VLConfig

    number = tokenizer_of([]).convert_tokens_to_ids
    return Qwen2VLConfig(
        text_config={
            "vocab_size": words, "hidden_size": WIDTH, "num_hidden_layers": 2,
            "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3],
            },
        },
        vision_config={
            "depth": 2, "embed_dim": 16, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2,
        },
        image_token_id=number("<|image_pad|>"), video_token_id=number("<|video_pad|>"),
        dtype="float32",
    )  # fmt: skip


def network(tokens: list[str]) -> Any:
    from transformers import Qwen2VLForConditionalGeneration

    return shaken(Qwen2VLForConditionalGeneration(config(len(tokenizer_of(tokens)))), seed=1)


def patches(frames: np.ndarray[Any, Any]) -> Tensor:
    """Cut frames (F, 3, H, W) of numbers from 0 to 255 as transformers' processor cuts images,
    one pair of frames and one token of two by two patches after another."""
    scaled = (frames / 255 - MEAN[:, None, None]) / DEVIATION[:, None, None]
    _, _, height, width = scaled.shape
    rows = [
        scaled[first : first + 2, :, top : top + 14, left : left + 14].swapaxes(0, 1).ravel()
        for first in range(0, len(scaled), 2)
        for y in range(0, height, 28)
        for x in range(0, width, 28)
        for top in (y, y + 14)
        for left in (x, x + 14)
    ]
    return torch.tensor(np.stack(rows), dtype=torch.float32)


def published(
    model: Any, tokens: list[str], frames: np.ndarray[Any, Any], question: str, kind: str
) -> Tensor:
    """The states at the reward's tokens, as the authors' code computes them."""
    tokenizer, base = tokenizer_of(tokens), model.model
    grid = torch.tensor([[len(frames) // 2, frames.shape[2] // 14, frames.shape[3] // 14]])
    pad = f"<|{kind}_pad|>"
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"<|vision_start|>{pad * int(grid.prod() // 4)}<|vision_end|>{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    words = base.language_model.embed_tokens(ids)
    seen = base.visual(patches(frames), grid_thw=grid).pooler_output
    is_seen = (ids == tokenizer.convert_tokens_to_ids(pad))[..., None].expand_as(words)
    states = base.language_model(inputs_embeds=words.masked_scatter(is_seen, seen))
    wanted = torch.isin(ids, torch.tensor(tokenizer.convert_tokens_to_ids(tokens)))
    found: Tensor = states.last_hidden_state[wanted]
    return found


def as_published(model: Any) -> dict[str, Tensor]:
    """Tensors by the names of transformers before 4.52, which both were saved with."""
    return {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in model.state_dict().items()
    }


@torch.no_grad()
def test_hpsv3_is_the_mean_that_the_published_head_gives(like: Path, tmp_path: Path) -> None:
    tokens = ["<|Reward|>"]
    model = network(tokens)
    head = shaken(
        nn.Sequential(
            nn.Linear(WIDTH, 24), nn.ReLU(), nn.Dropout(0.05), nn.Linear(24, 16), nn.ReLU(),
            nn.Linear(16, 2),
        ),
        seed=2,
    )  # fmt: skip
    heads = {f"rm_head.{name}": tensor for name, tensor in head.state_dict().items()}
    weights, out = tmp_path / "HPSv3.safetensors", tmp_path / "hpsv3"
    tensors = as_published(model) | heads
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, weights)
    make_folder("hpsv3", weights, like, out)
    given = images(3, 40, 72)
    expected = []
    for image, prompt in zip(given, PROMPTS, strict=True):
        sized = Image.fromarray(image.transpose(1, 2, 0)).resize((84, 56), Image.Resampling.BICUBIC)
        frames = np.asarray(sized).transpose(2, 0, 1)[None].repeat(2, axis=0)
        question = hpsv3.QUESTION.format(text_prompt=prompt)
        states = published(model, tokens, frames, question, "image")
        expected.append(float(head(states)[0, 0]))
    built = scorer("hpsv3", out)
    found = built.score(given, [{"prompt": prompt} for prompt in PROMPTS])
    assert found == pytest.approx(expected, abs=CLOSE)
    assert np.ptp(expected) > 1e-2
    with pytest.raises(ValueError, match="contains a token that is reserved"):
        built.score(given[:1], [{"prompt": "a <|Reward|>"}])


@torch.no_grad()
def test_video_align_is_the_published_ratings(like: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    tokens = list(video_align.TOKENS)
    model = network(tokens)
    model.rm_head = nn.Linear(WIDTH, 1, bias=False)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    shaken(inject_adapter_in_model(lora, model), seed=3)
    weights, out = tmp_path / "model.pth", tmp_path / "video-align"
    wrapped = {f"base_model.model.{name}": each for name, each in as_published(model).items()}
    torch.save(wrapped, weights)
    make_folder("video-align", weights, like, out)
    videos = images(2 * 9, 56, 56).reshape(2, 9, 3, 56, 56)
    rates = [8.0, 3.0]
    expected = []
    for video, prompt, rate in zip(videos, PROMPTS, rates, strict=False):
        num = max(4, min(8, round(9 / rate * 2 / 2) * 2))
        frames = video[torch.linspace(0, 8, num).round().long().numpy()]
        question = video_align.QUESTION.format(text_prompt=prompt)
        states = published(model, tokens, frames, question, "video")
        ratings = model.rm_head(states)[:, 0].tolist()
        means, deviations = (3.6757, 1.1646, 2.8105), (2.2476, 1.3811, 2.5121)
        expected.append([(r - m) / d for r, m, d in zip(ratings, means, deviations, strict=True)])
    told: list[dict[str, object]] = [
        {"prompt": prompt} | ({} if rate == 8.0 else {"fps": rate})
        for prompt, rate in zip(PROMPTS, rates, strict=False)
    ]
    for number, part in enumerate(("quality", "motion", "text")):
        found = scorer(f"video-align-{part}", out).score(videos, told)
        assert found == pytest.approx([each[number] for each in expected], abs=CLOSE)
    overall = scorer("video-align", out)
    assert overall.score(videos, told) == pytest.approx([sum(e) for e in expected], abs=3 * CLOSE)
    for bad, match in (({"fps": 0}, "metadata.fps is 0"), ({"fps": "x"}, "no frame rate")):
        with pytest.raises(ValueError, match=match):
            overall.score(videos[:1], [told[0] | bad])
    with pytest.raises(ValueError, match="one frame has no motion"):
        overall.score(videos[:1, :1], told[:1])


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("hpsv3", "f6ee57479d4e9eee76b49c00dc962e1e696a5a2b3cc32cebd9b1fa76fe27502c"),
        ("video_align", "fdb6309bac618dd0c8b1b589d3a0970a974f7856eecbb355a190b2dce54af700"),
    ],
)
def test_the_questions_are_the_published_ones(name: str, digest: str) -> None:
    """Digests of what hpsv3 1.0.0 on PyPI and VideoAlign at 3e5ebc60 put together."""
    assert hashlib.sha256(QUESTIONS[name].encode()).hexdigest() == digest


@pytest.mark.parametrize(
    ("size", "bounds", "expected"),
    [
        ((512, 512), (256, 256), (448, 448)),
        ((1024, 1024), (256, 256), (448, 448)),
        ((480, 832), (128, 256), (336, 588)),
        ((240, 416), (128, 256), (252, 420)),
        ((300, 1000), (256, 256), (224, 812)),
    ],
)
def test_a_picture_is_sized_as_qwen_s_processor_sizes_it(
    size: tuple[int, int], bounds: tuple[int, int], expected: tuple[int, int]
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    least, most = (each * 28 * 28 for each in bounds)
    assert fit_size(*size, least, most) == smart_resize(*size, 28, least, most) == expected


def test_a_still_is_cut_as_transformers_cuts_it() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    image = images(1, 56, 84)[0]
    made = Qwen2VLImageProcessorPil(do_resize=False)(images=[image], return_tensors="pt")
    cut = patches(image[None].repeat(2, axis=0))
    assert torch.allclose(made["pixel_values"], cut, atol=1e-5)


def test_a_base_without_a_configuration_is_one_line(tmp_path: Path) -> None:
    save_file({"rm_head.0.weight": torch.zeros(2, 2)}, tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=r"--like: cannot read config\.json of a Qwen2-VL"):
        make_folder("hpsv3", tmp_path / "w.safetensors", tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
