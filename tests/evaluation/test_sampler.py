"""The samples of an evaluation are the same however the network is held."""

import numpy as np

from digenrl.evaluation.sampler import Sampler
from tests.evaluation.runs import recipe_with


def test_an_evaluation_streams_where_rollout_does_and_makes_the_same_samples() -> None:
    """Nothing else could evaluate a run on cards that do not hold the network."""
    made = {}
    for memory in ("resident", "streamed"):
        sampler = Sampler(recipe_with({"rollout.memory": memory}))
        is_streamed = any(each.is_meta for each in sampler.model.transformer.parameters())
        assert is_streamed == (memory == "streamed")
        made[memory] = sampler.sample(["a handwritten three"], num_each=3, seed=1)
    assert np.array_equal(made["resident"], made["streamed"])
