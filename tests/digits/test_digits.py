from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file as load_torch
from torch import nn

from bench.digits.classifiers import (
    SVM_C,
    SVM_GAMMA,
    accuracy,
    fit_svm,
    gold_network,
    proxy_network,
)
from bench.digits.data import load_halves, to_uint8
from bench.digits.generator import Pretraining, build_pipeline, caption_conditions, pretrain
from bench.digits.text import all_prompts
from bench.digits.vae import build_vae
from digenrl.evaluation.digits import DataSplit, diversity, load_real, nearest_real
from services.reward.scorers.digits import DigitProbability, DigitSvm, Network, to_model_space
from shared.diffusion.families.sd3 import StableDiffusion3
from shared.diffusion.loading.models import ModelPart, load_model
from shared.diffusion.sampling.sampler import Denoising, SamplingPlan, denoise
from shared.learning.prompts import read_prompts
from shared.models.sigmas import linear_sigmas
from tests.paths import ROOT

MODEL = ROOT / "models" / "digits"
REWARDS = ROOT / "models" / "digits-rewards"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def halves() -> tuple[DataSplit, DataSplit]:
    return load_halves()


@pytest.fixture(scope="module")
def model() -> StableDiffusion3:
    loaded = load_model(MODEL, set(get_args(ModelPart)), device=CPU, dtype=torch.float32)
    assert isinstance(loaded, StableDiffusion3)
    return loaded


def test_the_halves_share_no_image_and_have_as_many_of_each_digit(
    halves: tuple[DataSplit, DataSplit],
) -> None:
    half_a, half_b = halves
    in_a = {image.tobytes() for image in half_a.images}
    assert not any(image.tobytes() in in_a for image in half_b.images)
    counts = [np.bincount(half.labels, minlength=10) for half in halves]
    assert np.abs(counts[0] - counts[1]).max() <= 1


def test_the_recipe_holds_the_forty_prompts() -> None:
    prompts = read_prompts(ROOT / "recipes" / "digits.prompts.jsonl")
    assert [(prompt.text, prompt.metadata["digit"]) for prompt in prompts] == all_prompts()
    assert len(prompts) == 40


def test_the_shipped_model_draws_images_through_the_sd3_adapter(model: StableDiffusion3) -> None:
    images = _draw(model, "a handwritten three", seeds=range(4))
    assert images.shape == (4, 1, 8, 8)
    assert images.min() == 0 and images.max() == 255


def test_no_two_prompts_look_alike_to_the_model(model: StableDiffusion3) -> None:
    for name, tensor in caption_conditions(model).items():
        rows = tensor.flatten(1)
        gaps = torch.cdist(rows, rows) + 1e9 * torch.eye(len(rows))
        assert gaps.min() > 0.1, name


def test_words_without_a_token_of_their_own_are_spelled_out(model: StableDiffusion3) -> None:
    some, other = (model.encode(text, guidance=1.0)["text"] for text in ("cat", "dog"))
    assert not torch.equal(some, other)


def test_the_autoencoder_leaves_digits_and_noise_as_they_are(
    halves: tuple[DataSplit, DataSplit],
) -> None:
    vae = build_vae()
    images = torch.from_numpy(halves[0].images)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    for pixels in (images, images + 0.1 * noise, noise):
        encoded = vae.encode(pixels).latent_dist.sample()
        latents = (encoded - vae.config.shift_factor) * vae.config.scaling_factor
        decoded = vae.decode(encoded).sample
        assert (latents - pixels).square().mean().sqrt() < 1e-3
        assert (decoded - pixels).square().mean().sqrt() < 1e-3


def test_pretraining_is_a_function_of_its_seed(halves: tuple[DataSplit, DataSplit]) -> None:
    recipe = Pretraining(num_steps=2, batch_size=8)
    weights = []
    for _ in range(2):
        pipeline = build_pipeline(seed=3)
        pretrain(pipeline, halves[0], recipe, seed=3, report=lambda line: None)
        weights.append(pipeline.transformer.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow
def test_each_classifier_knows_the_half_it_was_not_taught(
    halves: tuple[DataSplit, DataSplit],
) -> None:
    half_a, half_b = halves
    assert accuracy(DigitProbability(REWARDS), half_b) > 0.97
    assert accuracy(DigitProbability(REWARDS, "gold_mlp"), half_a) > 0.97
    assert accuracy(DigitSvm(REWARDS), half_a) > 0.97


def test_the_svm_equals_scikit_learns(halves: tuple[DataSplit, DataSplit]) -> None:
    from sklearn.svm import SVC

    half_a, half_b = halves
    rows = to_model_space(to_uint8(half_b.images)).reshape(len(half_b.images), -1)
    theirs = SVC(C=SVM_C, gamma=SVM_GAMMA).fit(rows, half_b.labels)
    noise = np.random.default_rng(0).integers(0, 256, (500, 1, 8, 8)).astype(np.uint8)
    images = np.concatenate([to_uint8(half_a.images), noise])
    wanted = theirs.predict(to_model_space(images).reshape(len(images), -1))
    assert (DigitSvm(REWARDS).predict(images) == wanted).all()


def test_the_shipped_svm_is_that_of_half_b(halves: tuple[DataSplit, DataSplit]) -> None:
    from safetensors.numpy import load_file

    shipped = load_file(REWARDS / "gold_svm.safetensors")
    for name, array in fit_svm(halves[1]).items():
        np.testing.assert_allclose(shipped[name], array, rtol=1e-3, atol=1e-3)


def test_a_score_is_the_probability_of_the_wanted_digit(
    halves: tuple[DataSplit, DataSplit],
) -> None:
    scorer = DigitProbability(REWARDS)
    images = to_uint8(halves[1].images[:5])
    rows = scorer.probabilities(images)
    scores = scorer.score(images, [{"digit": digit} for digit in range(5)])
    assert scores == [pytest.approx(rows[index, index]) for index in range(5)]
    assert rows.sum(axis=1) == pytest.approx(np.ones(5), abs=1e-5)


@pytest.mark.parametrize(
    ("network", "build"), [("proxy", proxy_network), ("gold_mlp", gold_network)]
)
def test_the_networks_equal_torchs_whatever_the_batch(
    network: Network, build: Callable[[], nn.Module], halves: tuple[DataSplit, DataSplit]
) -> None:
    theirs = build()
    theirs.load_state_dict(load_torch(REWARDS / f"{network}.safetensors"))
    images = to_uint8(halves[1].images[:200])
    with torch.inference_mode():
        wanted = theirs(torch.from_numpy(to_model_space(images))).softmax(-1).numpy()
    ours = DigitProbability(REWARDS, network)
    np.testing.assert_allclose(ours.probabilities(images), wanted, atol=1e-6)
    alone = [ours.probabilities(images[at : at + 1])[0] for at in range(len(images))]
    assert (ours.probabilities(images) == np.stack(alone)).all()


@pytest.mark.parametrize("metadata", [{}, {"digit": "33"}, {"digit": 10}, {"digit": True}])
def test_metadata_without_a_digit_is_refused(metadata: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="digit"):
        DigitProbability(REWARDS).score(np.zeros((1, 1, 8, 8), dtype=np.uint8), [metadata])


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (1, 1, 16, 16)])
def test_images_of_another_size_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="uint8 images"):
        DigitProbability(REWARDS).score(np.zeros(shape, dtype=np.uint8), [{"digit": 3}])


def test_images_and_metadata_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="2 images but metadata of 1"):
        DigitProbability(REWARDS).score(np.zeros((2, 1, 8, 8), dtype=np.uint8), [{"digit": 3}])


@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value")
def test_the_guards_measure_samples_of_some_digits_only(
    halves: tuple[DataSplit, DataSplit],
) -> None:
    """As of a few prompts of the user's own."""
    half, whole = halves
    some = DataSplit(half.images[half.labels < 3], half.labels[half.labels < 3])
    for figures in (nearest_real(some, whole), diversity(some)):
        assert np.isfinite(figures).tolist() == [True] * 3 + [False] * 7


def test_the_guards_measure_real_digits_as_real_and_diverse(
    halves: tuple[DataSplit, DataSplit],
) -> None:
    half_a, half_b = halves
    real = load_real(REWARDS)
    assert np.array_equal(real.images, half_b.images)
    assert nearest_real(half_a, real).mean() == pytest.approx(2.2, abs=0.1)
    assert diversity(half_a).mean() == pytest.approx(4.5, abs=0.1)


def test_the_guards_notice_broken_glyphs_and_copies(halves: tuple[DataSplit, DataSplit]) -> None:
    half_a, half_b = halves
    noise = np.random.default_rng(0).normal(0, 0.5, half_a.images.shape).astype(np.float32)
    broken = DataSplit(half_a.images + noise, half_a.labels)
    copies = DataSplit(np.repeat(half_a.images[:10], 5, axis=0), np.repeat(half_a.labels[:10], 5))
    assert nearest_real(broken, half_b).mean() > 3.5
    assert diversity(copies).mean() < 0.01


def _draw(model: StableDiffusion3, prompt: str, *, seeds: Sequence[int]) -> np.ndarray:
    conditions = model.encode(prompt, guidance=1.0)
    rows = {
        name: tensor.expand(len(seeds), *tensor.shape[1:]) for name, tensor in conditions.items()
    }
    plan = SamplingPlan(sigmas=linear_sigmas(10), window=range(0))
    denoising = Denoising(plan, seeds=seeds, shape=(1, 8, 8), device=CPU)
    latents = denoise(lambda x, sigma: model.velocity(x, sigma, rows, guidance=1.0), denoising)
    return np.asarray((model.decode(latents) * 255).round().to(torch.uint8).numpy())
