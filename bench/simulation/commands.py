"""`python -m bench sim`: a split of devices in the simulator."""

from typing import Annotated

import typer

from digenrl.commands.options import AsJson, LaunchUs, ProfileVariant, zero_or_one


def sim(
    profile: Annotated[str, typer.Option(help="cost profile: a name, or a JSON file")],
    rollout: Annotated[
        str, typer.Option(help="devices that generate, kind=count,...; with --mode fluid also none")
    ],
    trainer: Annotated[str, typer.Option(help="devices that train, kind=count,...")],
    variant: ProfileVariant = "lora",
    shard_devices: Annotated[
        int | None, typer.Option(min=1, help="with --variant full: devices of a shard group")
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="disaggregated; sequential: generate all, then train all; fluid: --trainer do both"
        ),
    ] = "disaggregated",
    staleness: Annotated[int, typer.Option(min=0, max=1, help="0 or 1")] = 0,
    tag: Annotated[
        str, typer.Option(help="auto, off, or how many groups the trainer generates at most")
    ] = "auto",
    fragment_size: Annotated[str, typer.Option(help="samples per fragment, or auto")] = "auto",
    tsp: Annotated[bool, typer.Option(help="time-step parallelism in training")] = True,
    batches: Annotated[int, typer.Option(help="number of measured batches")] = 8,
    seed: Annotated[int, typer.Option(help="seed of the devices' noise")] = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="add one technique after the other")
    ] = False,
    launch_us: LaunchUs = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a split of devices: step time, utilisation, and who waits for whom."""
    from bench.simulation.output import show_simulated, simulated_as_json
    from bench.simulation.simulate import simulated, typed_schedule
    from digenrl.planning.output import wide_console

    found = simulated(
        profile=profile,
        variant=variant,
        shard_devices=shard_devices,
        rollout=rollout,
        trainer=trainer,
        schedule=typed_schedule(
            mode=mode, staleness=zero_or_one(staleness), tag=tag, fragment_size=fragment_size,
            tsp=tsp,
        ),
        batches=batches,
        seed=seed,
        comparing=compare,
        launch_us=launch_us,
    )  # fmt: skip
    if as_json:
        typer.echo(simulated_as_json(found))
    else:
        show_simulated(found, wide_console())
