"""Numbers of the reference implementations, reproduced (tests/vectors/README.md)."""

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from shared.diffusion.sampling.transition import NoiseStep, transition
from shared.models import sigmas
from tests.paths import VECTORS

CASES: list[dict[str, Any]] = json.loads((VECTORS / "sde_step.json").read_text())["cases"]
SCHEDULES: list[dict[str, Any]] = json.loads((VECTORS / "schedules.json").read_text())
ARRAYS = dict(np.load(VECTORS / "sde_step.npz"))

# The dance references lose digits by dividing by sigma squared.
MEAN_ATOL = {"flow": 1e-5, "cps": 1e-5, "dance": 5e-5}
close_log_prob = partial(torch.testing.assert_close, rtol=2e-4, atol=2e-5)


def array(case: dict[str, Any], field: str) -> torch.Tensor:
    return torch.from_numpy(ARRAYS[f"{case['id']}/{field}"])


def step_of(case: dict[str, Any]) -> NoiseStep:
    return NoiseStep(
        sigma=torch.tensor(case["sigma"]),
        sigma_next=torch.tensor(case["sigma_next"]),
        sigma_max=case["sigma_max"],
        noise_level=case["noise_level"],
        variant=case["variant"],
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_sampled_step_is_the_references(case: dict[str, Any]) -> None:
    step = transition(array(case, "v"), array(case, "x"), step_of(case), noise=array(case, "z"))

    close = partial(torch.testing.assert_close, rtol=1e-5, atol=MEAN_ATOL[case["variant"]])
    close(step.mean, array(case, "mean"))
    close(step.latents, array(case, "prev"))
    close_log_prob(step.log_prob, torch.tensor(case["log_prob"]))
    torch.testing.assert_close(step.std, torch.tensor(case["total_std"]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        step.sqrt_neg_dt, torch.tensor(case["sqrt_neg_dt"]), rtol=1e-5, atol=1e-6
    )
    # What the references call "std" is g for flow and the total std for dance and cps.
    scale = step.noise_scale if case["variant"] == "flow" else step.std
    torch.testing.assert_close(scale, torch.tensor(case["std_dev_t"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_a_replayed_step_has_the_references_log_prob_and_gradient(case: dict[str, Any]) -> None:
    velocity = array(case, "v2").requires_grad_()
    step = transition(velocity, array(case, "x"), step_of(case), arrived=array(case, "prev"))
    step.log_prob.sum().backward()

    torch.testing.assert_close(step.mean.detach(), array(case, "mean2"), rtol=1e-5, atol=5e-5)
    close_log_prob(step.log_prob.detach(), torch.tensor(case["replay_log_prob"]))
    assert velocity.grad is not None
    gradient = array(case, "grad_v2")
    torch.testing.assert_close(velocity.grad, gradient, rtol=1e-5, atol=1e-5)
    ratio = torch.exp(step.log_prob.detach() - torch.tensor(case["log_prob"]))
    torch.testing.assert_close(ratio, torch.tensor(case["ratio"]), rtol=2e-4, atol=0)


def dynamic(row: dict[str, Any], **config: Any) -> sigmas.Sigmas:
    mu = {"base_shift": row["mu"], "max_shift": row["mu"], "use_dynamic_shifting": True}
    return sigmas.shift_by_tokens({**mu, **config}, row["n"], lambda: 1024)


def sigmas_of(row: dict[str, Any]) -> sigmas.Sigmas:
    match row["kind"].split(" ")[0]:
        case "sd3_shift3_default":
            return sigmas.default_sigmas(row["n"], 3.0)
        case "shift1_default":
            return sigmas.default_sigmas(row["n"], 1.0)
        case "flux_dyn":
            return dynamic(row)
        case "qwen_dyn":
            return dynamic(row, shift_terminal=0.02)
        case "hunyuan_shift7_pipeline":
            return sigmas.single_shift_sigmas(row["n"], 7.0)
        case "single_shift":
            return sigmas.single_shift_sigmas(row["n"], row["shift"])
        case kind:
            raise AssertionError(f"no schedule for the vector {kind}")


@pytest.mark.parametrize(
    "row", SCHEDULES, ids=lambda row: f"{row['kind'].split(' ')[0]}-{row['n']}"
)
def test_a_schedule_is_the_references(row: dict[str, Any]) -> None:
    assert sigmas_of(row) == pytest.approx(row["sigmas"], abs=2e-6)
