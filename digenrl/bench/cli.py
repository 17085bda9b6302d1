"""``digenrl bench``: each measurement is a command of its own, which imports what it needs."""

import typer

from digenrl.bench.cluster.command import command as cluster
from digenrl.bench.cluster.suite_command import command as everything
from digenrl.bench.device.command import command as device
from digenrl.bench.loop_command import command as loop
from digenrl.bench.two_devices.command import command as two_devices

bench = typer.Typer(help="Measure: schedules, devices, control.", no_args_is_help=True)
bench.command("cluster")(cluster)
bench.command("two-devices")(two_devices)
bench.command("device")(device)
bench.command("loop")(loop)
bench.command("all")(everything)
