"""The samples of an evaluation are the same however the network is held."""

import numpy as np

from digenrl.evaluation.sampler import Sampler
from shared.diffusion.streaming import offloaded_groups
from tests.evaluation.runs import recipe_with


def test_an_evaluation_streams_where_rollout_does_and_makes_the_same_samples() -> None:
    """Nothing else could evaluate a run on cards that do not hold the network."""
    made = {}
    for memory in ("resident", "streamed"):
        sampler = Sampler(recipe_with({"rollout.memory": memory}))
        assert any(offloaded_groups(sampler.model.transformer)) == (memory == "streamed")
        made[memory] = sampler.sample(["a handwritten three"], num_each=3, seed=1)
    assert np.array_equal(made["resident"], made["streamed"])
