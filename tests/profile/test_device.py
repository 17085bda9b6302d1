"""`digenrl profile` on a CPU: architectures in miniature, full sizes without memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from digenrl.trace.device_profile.command import build, check_request, profile
from digenrl.trace.device_profile.measure import changing_over, denoising, measure, training
from digenrl.trace.device_profile.models import ARCHITECTURES, Architecture, ModelName
from digenrl.trace.device_profile.network import (
    DTYPE,
    Network,
    adapted,
    draw_parameters,
    loaded_transformer,
)
from services.scheduler.costs.profile import PROFILES, load_profile
from shared.diffusion.weights.trained_weights import weights_digest
from shared.errors import UserError

CPU = torch.device("cpu")
META = torch.device("meta")
IN_MINIATURE = (ModelName.qwen_image, ModelName.hunyuanvideo)
"""An image and a video. A network of each kind is run by another test."""
MEASURED = (
    "rollout.call_seconds", "rollout.sample_seconds", "rollout.memory_gib",
    "variants.lora.rho", "variants.lora.memory_gib", "variants.lora.optimizer_seconds",
    "variants.lora.published_gb", "variants.lora.publish_seconds", "variants.lora.adopt_seconds",
    "variants.lora.switch_seconds",
)  # fmt: skip
OF_DEVICE = ("rollout.call_seconds", "rollout.sample_seconds", "variants.lora.rho")
"""What is not known where the host sets the pace of every call."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads cost networks of this size more than they give."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(*arguments: str) -> str:
    app = Typer(pretty_exceptions_enable=False)
    app.command()(profile)
    found = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


def tiny(model: ModelName) -> Network:
    return build(model, None, tiny=True, rank=4, checkpointing=True)


def at_full_size(architecture: Architecture) -> Network:
    """Build the network without weights and without an adapter."""
    import diffusers

    with META:
        transformer = getattr(diffusers, architecture.network).from_config(
            dict(architecture.config)
        )
    return Network(architecture, transformer.to(DTYPE))


@pytest.mark.parametrize(
    "model",
    [
        each if each in IN_MINIATURE else pytest.param(each, marks=pytest.mark.slow)
        for each in ModelName
    ],
)
def test_each_architecture_is_measured_in_miniature(model: ModelName, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    before = sorted(PROFILES.iterdir())

    shown = run(
        "--model", model, "--random-weights", "--tiny", "--rank", "4", "--repeats", "2",
        "--max-batch", "2", "--out", str(out),
    )  # fmt: skip

    profile = load_profile(out)
    assert profile.name == f"{model}@cpu"
    assert {"cpu", "H100", "A100", "L40S"} <= set(profile.devices)
    sources = json.loads(out.read_text())["sources"]
    is_host_bound = any(path.startswith("host.") for path in sources)  # so small a network may be
    for path in set(MEASURED) - (set(OF_DEVICE) if is_host_bound else set()):
        assert sources[path]["kind"] == "measured" and "tiny" in sources[path]["note"]
    reward = sources.get("rollout.reward_seconds", sources.get("rollout"))
    assert reward["kind"] != "measured" or model == "qwen-image"
    assert "gradient unchanged by it" in shown and "NO" not in shown
    assert sorted(PROFILES.iterdir()) == before


def test_a_tiny_network_gives_finite_velocities_of_the_shape_of_its_latents() -> None:
    for model in ModelName:
        network = tiny(model)
        latents = torch.randn(2, *network.latent_shape)
        with torch.no_grad():
            velocity = network.velocity(2)(latents, torch.tensor([1.0, 0.3]))
        assert velocity.shape == latents.shape
        assert velocity.isfinite().all() and velocity.abs().max() > 0


def test_types_are_those_that_diffusers_loads_and_the_adapter_is_float32() -> None:
    network = tiny(ModelName.wan21_14b)
    dtypes = {name: p.dtype for name, p in network.transformer.named_parameters()}
    assert dtypes["blocks.0.ffn.net.2.weight"] == torch.bfloat16
    assert dtypes["blocks.0.norm2.weight"] == dtypes["scale_shift_table"] == torch.float32
    assert {p.dtype for p in network.adapter} == {torch.float32}


@pytest.mark.parametrize(
    "model",
    [
        each if each == ModelName.sd35_medium else pytest.param(each, marks=pytest.mark.slow)
        for each in ModelName
    ],
)
def test_inputs_fit_the_network_at_full_size(model: ModelName) -> None:
    architecture = ARCHITECTURES[model]
    network = at_full_size(architecture)
    latents = torch.empty(2, *network.latent_shape, device=META)

    with torch.no_grad():
        velocity = network.velocity(2)(latents, torch.rand(2, device=META))

    assert velocity.shape == latents.shape
    config: dict[str, Any] = dict(network.transformer.config)
    assert {key: config[key] for key in architecture.config} == dict(architecture.config)
    gigabytes, adapter = _gigabytes(network, rank=64)
    if model is not ModelName.sd35_medium:
        full, lora = load_profile(model, "full").variant, load_profile(model).variant
        assert gigabytes == pytest.approx(full.published_gb, rel=0.01)
        assert adapter == pytest.approx(lora.published_gb, rel=0.05)
    else:
        assert gigabytes == pytest.approx(4.49, rel=0.01)


def _gigabytes(network: Network, *, rank: int) -> tuple[float, float]:
    """Return the GB of all weights and of the adapter on its targets, both in bfloat16."""
    weights = sum(p.numel() for p in network.transformer.parameters())
    adapter = sum(
        rank * (module.in_features + module.out_features)
        for name, module in network.transformer.named_modules()
        if isinstance(module, torch.nn.Linear)
        and any(name.endswith(f".{target}") for target in network.architecture.family.lora_targets)
    )
    return 2 * weights / 1e9, 2 * adapter / 1e9


def test_changing_over_leaves_the_gradient_as_it_is_and_says_so() -> None:
    network = tiny(ModelName.flux1_dev)
    train = training(network, 2)
    found = changing_over(network, denoise=denoising(network, 2, 5), train=train, repeats=2)
    assert found.gradient_unchanged

    def meddle() -> None:
        gradient = network.adapter[-1].grad
        assert gradient is not None
        gradient += 1e-3

    train()
    assert not changing_over(network, denoise=meddle, train=train, repeats=1).gradient_unchanged


@pytest.mark.clock
def test_what_is_published_is_the_adapter_that_is_then_in_use() -> None:
    network = tiny(ModelName.qwen_image)
    before = weights_digest(dict(enumerate_names(network)))
    found = measure(network, max_batch=1, repeats=1, report=lambda line: None)
    after = weights_digest(dict(enumerate_names(network)))
    assert before != after  # the optimizer was timed
    assert found.publication.num_bytes > sum(p.nbytes for p in network.adapter)
    assert len(found.publication.digest) == 64
    assert found.publication.pause_seconds < found.publication.seconds


def enumerate_names(network: Network) -> list[tuple[str, torch.Tensor]]:
    return [(str(index), weight) for index, weight in enumerate(network.adapter)]


def test_out_of_memory_ends_a_ladder_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    network = tiny(ModelName.sd35_medium)
    forward = network.transformer.forward

    def small(hidden_states: torch.Tensor, **others: Any) -> Any:
        if len(hidden_states) > (1 if torch.is_grad_enabled() else 2):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(hidden_states=hidden_states, **others)

    monkeypatch.setattr(network.transformer, "forward", small)
    lines: list[str] = []
    found = measure(network, max_batch=8, repeats=1, report=lines.append)

    assert [rung.rows for rung in found.generation.rungs] == [1, 2]
    assert found.generation.out_of_memory == 4
    assert [rung.rows for rung in found.training.rungs] == [1]
    assert found.switch is not None and found.switch.gradient_unchanged
    assert "4 samples do not fit the device" in lines and "2 rows do not fit the device" in lines


def test_a_model_that_cannot_be_trained_here_is_measured_for_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = tiny(ModelName.sd35_medium)
    forward = network.transformer.forward

    def never_trains(**inputs: Any) -> Any:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(**inputs)

    monkeypatch.setattr(network.transformer, "forward", never_trains)
    found = measure(network, max_batch=2, repeats=1, report=lambda line: None)

    assert len(found.generation.rungs) == 2 and not found.training.rungs
    assert found.optimizer_seconds is None and found.switch is None
    assert found.publication.num_bytes > 0


def test_real_weights_come_from_a_folder(tmp_path: Path) -> None:
    architecture = ARCHITECTURES[ModelName.sd35_medium].tiny()
    import diffusers

    saved = diffusers.SD3Transformer2DModel.from_config(dict(architecture.config))
    draw_parameters(saved, CPU)
    saved.save_pretrained(tmp_path / "transformer")

    loaded = loaded_transformer(architecture, tmp_path)
    network = adapted(architecture, loaded, CPU, rank=4, checkpointing=False)

    assert torch.equal(network.transformer.proj_out.weight, saved.proj_out.weight)
    with pytest.raises(UserError, match="--folder: cannot load SD3Transformer2DModel"):
        loaded_transformer(architecture, tmp_path / "none")


def test_requests_that_make_no_sense_are_one_line() -> None:
    def request(**changes: Any) -> None:
        check_request(
            **{"random_weights": True, "folder": None, "tiny": True, "out": None, **changes}
        )

    request()
    request(tiny=False)
    for changes, words in (
        ({"random_weights": False}, "either --random-weights, or --folder"),
        ({"folder": Path("flux")}, "either --random-weights, or --folder"),
        ({"random_weights": False, "folder": Path("flux")}, "--tiny has random weights only"),
        ({"out": PROFILES / "flux1-dev@cpu.json"}, "write it elsewhere"),
    ):
        with pytest.raises(UserError, match=words):
            request(**changes)


def test_without_a_gpu_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA device here"):
        run("--model", "flux1-dev", "--random-weights")
