"""The demo's model, and a generator of it with an adapter that changes what is sampled."""

import pytest

from shared.diffusion.generation import Generator
from shared.diffusion.policy import LoadedPolicy
from tests.shared.diffusion.digits import RECIPE, adapter, load_digits


@pytest.fixture(scope="module")
def policy() -> LoadedPolicy:
    return load_digits()


@pytest.fixture
def generator(policy: LoadedPolicy) -> Generator:
    made = Generator(RECIPE, policy)
    made.load(adapter(policy, 1))
    policy.model.transformer.zero_grad(set_to_none=True)
    return made
