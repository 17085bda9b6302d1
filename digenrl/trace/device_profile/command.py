"""`digenrl profile`: from its options to a profile.

Imported with the command line, so what is heavy is imported when it runs.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from digenrl.trace.device_profile.models import ARCHITECTURES, ModelName
from shared.errors import UserError

if TYPE_CHECKING:
    import torch

    from digenrl.trace.device_profile.device_costs import MeasurementDevice
    from digenrl.trace.device_profile.network import Network


def profile(
    model: Annotated[ModelName, typer.Option(help="which network")],
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="draw the weights: they cost what real ones do")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="a diffusers folder, to measure with its weights")
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="a tiny network on the CPU, to try the command out")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="the profile's file; by default next to the shipped ones")
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="repetitions; each number is their median")
    ] = 5,
    max_batch: Annotated[int, typer.Option(min=1, help="samples or rows per call, at most")] = 16,
    rank: Annotated[int, typer.Option(min=1, help="rank of the LoRA adapter")] = 64,
    checkpointing: Annotated[
        bool, typer.Option(help="training computes activations again in its backward pass")
    ] = True,
) -> None:
    """Measure generation, training and handover of one model on this device, as a cost profile."""
    check_request(random_weights=random_weights, folder=folder, tiny=tiny, out=out)
    from rich.console import Console

    from digenrl.trace.device_profile.device_costs import base_profile, measured_profile
    from digenrl.trace.device_profile.measure import measure
    from digenrl.trace.device_profile.show import show
    from digenrl.trace.profile import write_profile
    from services.scheduler.costs.profile import PROFILES

    console = Console(markup=False)
    base = base_profile(model)
    with console.status(f"building {model}"):
        network = build(model, folder, tiny=tiny, rank=rank, checkpointing=checkpointing)
    with console.status(f"measuring {model}"):
        measured = measure(network, max_batch=max_batch, repeats=repeats, report=console.print)
    weights = "random weights" if folder is None else "real weights"
    how = f"{'tiny network, ' if tiny else ''}{weights}, LoRA r{rank}, medians of {repeats}"
    how += ", activation checkpointing" if checkpointing else ""
    measured_costs = measured_profile(base, measured, described(network.device, how))
    show(base, measured_costs, measured, console)
    path = out or (None if tiny else PROFILES / f"{measured_costs.name}.json")
    if path is not None:
        write_profile(measured_costs, path)
        console.print(f"written to {path}")


def check_request(
    *, random_weights: bool, folder: Path | None, tiny: bool, out: Path | None
) -> None:
    """Raises UserError for faults that show before anything is built, without torch."""
    from services.scheduler.costs.profile import PROFILES

    if random_weights == (folder is not None):
        raise UserError("profile: give either --random-weights, or --folder with real ones")
    if not tiny:
        return
    if folder is not None:
        raise UserError("profile: --tiny has random weights only; leave out --folder")
    if out is not None and out.resolve().is_relative_to(PROFILES.resolve()):
        raise UserError("--out: a tiny network is no profile; write it elsewhere")


def build(
    model: ModelName, folder: Path | None, *, tiny: bool, rank: int, checkpointing: bool
) -> "Network":
    """Builds the network where it is to be measured.

    Raises:
        UserError: if there is no CUDA device, or if the network does not fit it.
    """
    import torch

    from digenrl.trace.device_profile.network import adapted, loaded_transformer, random_transformer
    from shared.diffusion.loading.device import choose_kernels
    from shared.recipe.tables import Model

    if not tiny and not torch.cuda.is_available():
        raise UserError("profile: no CUDA device here; --tiny tries it out on the CPU")
    device = torch.device("cpu" if tiny else "cuda")
    architecture = ARCHITECTURES[model].tiny() if tiny else ARCHITECTURES[model]
    choose_kernels(device, Model.model_fields["matmul_precision"].default)  # as a run does
    try:
        transformer = (
            random_transformer(architecture, device)
            if folder is None
            else loaded_transformer(architecture, folder)
        )
        return adapted(architecture, transformer, device, rank=rank, checkpointing=checkpointing)
    except torch.OutOfMemoryError as error:
        raise UserError(f"profile: the weights of {model} do not fit this device") from error


def described(device: "torch.device", how: str) -> "MeasurementDevice":
    """Describes the device, with what was measured on it and by which versions."""
    import diffusers
    import torch

    from digenrl.trace.device_profile.device_costs import MeasurementDevice
    from shared.diffusion.loading.device import device_bytes

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    versions = f"torch {torch.__version__}, diffusers {diffusers.__version__}"
    return MeasurementDevice(
        name=name, memory_gib=device_bytes(device) / 2**30, how=f"{name}: {how}; {versions}."
    )
