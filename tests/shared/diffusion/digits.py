"""The demo's model with weights that matter, and work for it."""

import torch

from shared.diffusion.loading.models import repeat_rows
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.sampling.tensors import pack, unpack
from shared.diffusion.weights.trained_weights import trained_parameters, trained_tensors
from shared.messages.contracts import GenerateFragment, Prompt
from shared.recipe.recipe import load_recipe
from tests import examples
from tests.paths import DIGITS

RECIPE = load_recipe(DIGITS)
PROMPT = "a handwritten three"


def load_digits() -> LoadedPolicy:
    torch.set_num_threads(1)
    return load_policy(RECIPE, {"transformer", "text", "decoder"})


def adapter(policy: LoadedPolicy, seed: int) -> bytes:
    """Weights of an adapter that changes what is sampled: a fresh one changes nothing."""
    generator = torch.Generator().manual_seed(seed)
    tensors = trained_tensors(policy.model.transformer)
    return pack({n: 0.1 * torch.randn(t.shape, generator=generator) for n, t in tensors.items()})


def task(group: int = 0, *, num_samples: int = 4, first_sample: int = 0) -> GenerateFragment:
    return examples.task(
        group=group, num_samples=num_samples, first_sample=first_sample, prompt=Prompt(text=PROMPT),
        window_start=1,
    )  # fmt: skip


def accumulate(policy: LoadedPolicy, conditions: bytes, seed: int) -> None:
    """Add some gradient to what the adapter holds."""
    latents = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    rows = repeat_rows(unpack(conditions), 2)
    sigma = torch.tensor([0.9, 0.3])
    guidance = RECIPE.model.guidance
    policy.model.velocity(latents, sigma, rows, guidance=guidance).square().sum().backward()


def gradient(policy: LoadedPolicy) -> dict[str, torch.Tensor]:
    """A copy of the gradient accumulated so far."""
    parameters = trained_parameters(policy.model.transformer)
    return {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether both hold the same tensors to the last bit, and at least one."""
    return (
        len(one) > 0
        and one.keys() == other.keys()
        and all(map(torch.equal, one.values(), other.values()))
    )
