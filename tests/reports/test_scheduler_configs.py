"""`sampling.sigmas = "model"` gives the sigmas of the model's own pipeline, or names the setting of
its scheduler that it does not follow (diffusers#9924, #10001; Wan's own UniPC)."""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import UserError
from shared.models.catalogue import find_family, pipeline_sigmas
from shared.models.published import PUBLISHED
from shared.models.sigmas import unknown_keys
from tests.reports.model_folders import change, copy_of

SIZE, FRAMES = 32, {"wan": 5}
SCHEDULE = "scheduler/scheduler_config.json"
WAN = json.loads((PUBLISHED / "wan2.1-14b" / SCHEDULE).read_text())
DYNAMIC = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}


def theirs(folder: Path, family: str, steps: int) -> list[float]:
    """The sigmas that diffusers' pipeline goes through."""
    import diffusers

    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    frames = {"num_frames": FRAMES[family]} if family in FRAMES else {}
    pipeline(
        prompt="a cat",
        height=SIZE,
        width=SIZE,
        num_inference_steps=steps,
        output_type="latent",
        **frames,
    )
    return [float(sigma) for sigma in pipeline.scheduler.sigmas]


def changed(folder: Path, family: str, settings: dict[str, Any]) -> Path:
    copy_of(family, folder)
    change(folder / SCHEDULE, **settings)
    if name := settings.get("_class_name"):
        change(folder / "model_index.json", scheduler=["diffusers", name])
    return folder


def ours(folder: Path, family: str, steps: int) -> list[float]:
    frames = FRAMES.get(family, 1)
    return list(pipeline_sigmas(folder, steps, height=SIZE, width=SIZE, frames=frames))


UNIPC = {**WAN, "flow_shift": 5.0}
FOLLOWED = [
    ("wan", WAN, 6),
    ("sd3", DYNAMIC, 6),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            *((("wan"), WAN, steps) for steps in (1, 2, 3, 10, 20, 50)),
            *(("wan", UNIPC, steps) for steps in (4, 30)),
            ("wan", {**WAN, "shift_terminal": 0.02}, 6),
            ("wan", {}, 6),
            ("sd3", {}, 10), ("sd3", {**DYNAMIC, "time_shift_type": "linear"}, 6),
            ("sd3", {"shift_terminal": 0.1}, 6), ("sd3", {"shift": ...}, 6),
            ("flux", {}, 6), ("flux", {"shift_terminal": 0.02}, 6),
            ("flux", {"time_shift_type": "linear"}, 6),
            ("flux", {"use_dynamic_shifting": False, "shift_terminal": 0.02}, 6),
            ("flux2-klein", {"shift_terminal": 0.05}, 6),
            ("z-image", {"shift_terminal": 0.05}, 6),
            ("hunyuan-video", {"shift_terminal": 0.05}, 6),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize(("family", "settings", "steps"), FOLLOWED)
def test_the_sigmas_are_those_of_the_pipeline(
    family: str, settings: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    folder = changed(tmp_path / "model", family, settings)
    found, wanted = ours(folder, family, steps), theirs(folder, family, steps)
    assert found == pytest.approx(wanted, abs=3e-6)
    assert found[0] == 1 and found[-1] == 0


DPM = {"_class_name": "DPMSolverMultistepScheduler", "use_flow_sigmas": True, "flow_shift": 3.0}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("sd3", {"use_beta_sigmas": True}, "use_beta_sigmas = true"),
    ("flux", {"use_beta_sigmas": True}, "use_beta_sigmas = true"),
    ("sd3", {"use_karras_sigmas": True}, "use_karras_sigmas = true"),
    ("flux", {"use_exponential_sigmas": True}, "use_exponential_sigmas = true"),
    ("sd3", {"invert_sigmas": True}, "invert_sigmas = true"),
    ("sd3", {"num_train_timesteps": 100}, "num_train_timesteps = 100"),
    ("flux", {"stochastic_sampling": True}, "stochastic_sampling = true"),
    ("sd3", {"shift": "3.0"}, 'shift = "3.0"'),
    ("sd3", {"_class_name": "FlowMatchHeunDiscreteScheduler"}, "FlowMatchHeunDiscreteScheduler"),
    ("sd3", {"_class_name": "FlowMatchLCMScheduler"}, "FlowMatchLCMScheduler"),
    ("sd3", DPM, "DPMSolverMultistepScheduler"),
    ("flux", WAN, "UniPCMultistepScheduler"),
    ("wan", {"use_dynamic_shifting": True}, "use_dynamic_shifting = true"),
    ("wan", {**WAN, "use_flow_sigmas": False}, "use_flow_sigmas = false"),
    ("wan", {**WAN, "use_flow_sigmas": ...}, "use_flow_sigmas = false"),
    ("wan", {**WAN, "prediction_type": ...}, 'prediction_type = "epsilon"'),
    ("wan", {**WAN, "use_karras_sigmas": True}, "use_karras_sigmas = true"),
    ("wan", {**WAN, "final_sigmas_type": "sigma_min"}, 'final_sigmas_type = "sigma_min"'),
    ("flux", {"a_new_switch": 0.5}, "a_new_switch = 0.5"),
]


@pytest.mark.parametrize(("family", "settings", "named"), REFUSED)
def test_a_setting_that_is_not_followed_is_refused_by_its_name(
    family: str, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = changed(tmp_path / "model", family, settings)
    with pytest.raises(UserError) as refused:
        ours(folder, family, 6)
    said = str(refused.value)
    assert said.startswith('sampling.sigmas: "model" does not support ') and named in said
    assert (
        "sigmas of its pipeline's scheduler as numbers" in said and "scheduler_config.json" in said
    )


@pytest.mark.parametrize("name", sorted(each.name for each in PUBLISHED.iterdir()))
def test_the_published_schedulers_are_followed(name: str) -> None:
    config = json.loads((PUBLISHED / name / SCHEDULE).read_text())
    assert unknown_keys(find_family(PUBLISHED / name).sigmas, config) == []
