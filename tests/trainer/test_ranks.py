"""Gradients are exchanged once per batch: two real ranks over gloo."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from shared.diffusion.models import Conditions
from shared.diffusion.sampler import SamplingPlan, Trajectory
from shared.diffusion.training.chunks import Chunk
from shared.diffusion.training.gradient import GradientTransaction
from shared.diffusion.training.group import PathGroup
from shared.recipe_sampling import Algorithm

RANKS, GROUPS, SAMPLES, STEPS = 2, 2, 2, 3
PLAN = SamplingPlan(sigmas=(1.0, 0.8, 0.6, 0.4, 0.0), window=range(STEPS), noise_level=0.7)
ROWS = GROUPS * SAMPLES * STEPS
"""On each rank."""

Outcome = tuple[Tensor, int]
"""The gradient, and how often the ranks exchanged it."""


class Network(nn.Module):
    """One adapted layer, its parameters named as LoRA's are."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_A = nn.ModuleDict({"default": nn.Linear(4, 4, bias=False)})
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-0.3, 0.4, parameter.numel()).view_as(parameter))

    def forward(self, latents: Tensor) -> Tensor:
        velocity: Tensor = self.lora_A["default"](latents)
        return velocity


class Model:
    """As much of a model adapter as training needs."""

    lora_targets: list[str]

    def __init__(self, transformer: nn.Module) -> None:
        self.transformer = transformer

    def velocity(
        self, latents: Tensor, sigma: Tensor, conditions: Conditions, *, guidance: float
    ) -> Tensor:
        velocity: Tensor = self.transformer(latents)
        return velocity


class Exchanges(TorchDispatchMode):
    """Counts reductions among ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func.namespace == "c10d" and "reduce" in func.__name__
        return func(*args, **(kwargs or {}))


def groups_of(rank: int, zero: int | None = None) -> list[PathGroup]:
    """``zero``: the group of this rank that has no advantage."""
    generator = torch.Generator().manual_seed(rank)
    return [
        PathGroup(
            trajectory=Trajectory(
                latents=torch.randn(SAMPLES, STEPS + 1, 4, generator=generator),
                log_probs=torch.zeros(SAMPLES, STEPS),
                step_indices=torch.arange(STEPS),
                sigmas=torch.tensor(PLAN.sigmas),
            ),
            advantages=torch.randn(SAMPLES, generator=generator) * (number != zero),
            conditions={},
            plan=PLAN,
        )
        for number in range(GROUPS)
    ]


def outcome(
    network: nn.Module, groups: list[PathGroup], num_rows: int, *, skips: bool = False
) -> Outcome:
    transaction = GradientTransaction(
        model=Model(network),  # type: ignore[arg-type]
        algorithm=Algorithm(stale_loss="decoupled", kl_beta=0.0 if skips else 0.1),
        num_rows=num_rows,
        guidance=1.0,
    )
    transaction.begin()
    with Exchanges() as exchanges:
        for group in groups:
            rows = SAMPLES * STEPS
            if skips and not group.advantages.any() and transaction.may_skip(rows):
                transaction.skip(rows)
            else:
                transaction.accumulate(group, Chunk(samples=1, steps=2))
    assert transaction.metrics()["zero_advantage_fraction"] == sum(
        0.0 if group.advantages.any() else 1 / len(groups) for group in groups
    )
    gradient = next(iter(network.parameters())).grad
    assert gradient is not None
    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return whole, exchanges.count


def networks() -> dict[str, nn.Module]:
    sharded = Network()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (RANKS,)))
    return {"ddp": DistributedDataParallel(Network()), "fsdp": sharded}


def on_rank(rank: int, rendezvous: str) -> dict[str, Outcome]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    try:
        trained = {name: outcome(n, groups_of(rank), ROWS) for name, n in networks().items()}
        # On rank 0 the first group is zero, on rank 1 the last, in which gradients are exchanged:
        # were it left out, rank 0 would wait for ever.
        zeros = groups_of(rank, zero=rank)
        skipped = {
            f"{name}, skipping": outcome(n, zeros, ROWS, skips=True)
            for name, n in networks().items()
        }
        return trained | skipped
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    rendezvous: Path = tmp_path_factory.mktemp("ranks") / "rendezvous"
    with ProcessPoolExecutor(RANKS, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(on_rank, rank, rendezvous.as_uri()) for rank in range(RANKS)]
        return [future.result(timeout=120) for future in running]


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
@pytest.mark.parametrize("skips", [False, True])
def test_ranks_exchange_gradients_once_per_batch_and_get_that_of_all_rows(
    outcomes: list[dict[str, Outcome]], wrapped: str, skips: bool
) -> None:
    zeros = range(RANKS) if skips else [None] * RANKS
    everything = [group for rank in range(RANKS) for group in groups_of(rank, zeros[rank])]
    wanted, none = outcome(Network(), everything, RANKS * ROWS, skips=skips)
    assert none == 0
    for ranks in outcomes:
        found, num_exchanges = ranks[f"{wrapped}, skipping" if skips else wrapped]
        assert num_exchanges == 1
        torch.testing.assert_close(found, wanted)


def test_a_pass_in_which_ranks_meet_cannot_be_left_out() -> None:
    transaction = GradientTransaction(
        model=Model(DistributedDataParallel.__new__(DistributedDataParallel)),  # type: ignore[arg-type]
        algorithm=Algorithm(),
        num_rows=ROWS,
        guidance=1.0,
    )
    transaction.skip(ROWS // 2)
    with pytest.raises(ValueError, match="wait"):
        transaction.skip(ROWS // 2)
