"""An algorithm with rows of its own is one file and one row, as CONTRIBUTING says: `ends.py` stands
for the file, and the fixture for the row."""

from collections.abc import Iterator

import pytest
import torch

from shared.devices.chunks import Chunk
from shared.diffusion.policy import LoadedPolicy, load_policy
from shared.diffusion.training.rows import check_stored, read_group
from shared.errors import ContractError, UserError
from shared.learning.algorithms import ALGORITHMS, Method
from tests.shared.learning import ends
from tests.trainer.engine.test_algorithms import SIZE, WINDOW, error, gradient, group, recipe_of

NAME = "end-regression"


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    method = Method(
        f"{ends.__name__}:regress", ("flow",), rows=f"{ends.__name__}:ENDS", has_window=False,
        implies={"sampling.noise_level": 0.6},
    )  # fmt: skip
    monkeypatch.setitem(ALGORITHMS, NAME, method)
    yield


@pytest.fixture(scope="module")
def policy() -> LoadedPolicy:
    torch.set_num_threads(1)
    return load_policy(recipe_of("flow-grpo"), {"transformer", "text", "decoder"})


@pytest.mark.usefixtures("added")
def test_an_algorithm_with_rows_of_its_own_samples_stores_and_trains(policy: LoadedPolicy) -> None:
    recipe = recipe_of(NAME)
    data = group(recipe, policy)
    check_stored(recipe, data.trajectories[0], data.conditions, SIZE)
    assert read_group(recipe, data).shape == (SIZE, WINDOW)
    wanted, _ = gradient(recipe, policy, data, Chunk(SIZE, WINDOW))
    assert any(tensor.any() for tensor in wanted.values())
    cut, _ = gradient(recipe, policy, group(recipe, policy, (1, 3)), Chunk(1, 2))
    assert error(cut, wanted) < 1e-5
    path = group(recipe_of("flow-grpo"), policy)
    with pytest.raises(ContractError, match="not the ends of samples"):
        check_stored(recipe, path.trajectories[0], path.conditions, SIZE)


@pytest.mark.usefixtures("added")
def test_its_row_decides_what_a_recipe_may_ask_of_it() -> None:
    assert recipe_of(NAME, algorithm__advantage_std="batch").algorithm.name == NAME
    with pytest.raises(UserError, match=f'"decoupled" is not defined for {NAME}'):
        recipe_of(NAME, algorithm__stale_loss="decoupled")
    with pytest.raises(UserError, match="does not sample with 'cps'"):
        recipe_of(NAME, sampling__variant="cps")


def test_an_algorithm_that_has_no_row_is_unknown() -> None:
    with pytest.raises(UserError, match=rf"algorithm\.name: .*or 'dpo', not '{NAME}'"):
        recipe_of(NAME)
