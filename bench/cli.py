"""The commands of ``python -m bench``, which import what they need when they are called."""

import typer

from bench.cluster.command import command as cluster
from bench.cluster.suite_command import command as everything
from bench.loop_command import command as loop
from bench.two_devices.command import command as two_devices

bench = typer.Typer(help="Measure: schedules, devices, control.", no_args_is_help=True)
bench.command("cluster")(cluster)
bench.command("two-devices")(two_devices)
bench.command("loop")(loop)
bench.command("all")(everything)
