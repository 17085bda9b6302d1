"""``digenrl``: one command, each of its parts imported only when it is asked for."""

import asyncio
import contextlib
import sys
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer

from digenrl.commands.runs import TensorBoardFolder, WandbProject, evaluate, follow, report
from digenrl.profile.command import command as profile_device
from shared.errors import DigenRLError, UserError

EXIT_FAILED = 1
EXIT_USER_ERROR = 2

app = typer.Typer(
    name="digenrl",
    help="Reinforcement learning for image and video generators, on GPUs that need not be alike.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its import takes longer than everything else together
)
model = typer.Typer(help="Make the demo's model, or the folder of a reward.", no_args_is_help=True)
app.add_typer(model, name="model")
app.command("profile")(profile_device)
for command in (report, follow, evaluate):
    app.command()(command)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"digenrl {version('digenrl')}")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_say_version, help="say it, and end"),
    ] = False,
) -> None:
    """Take the options that stand before a command."""


RecipeFile = Annotated[Path, typer.Argument(help="the run's recipe, a TOML file")]
HostGpus = Annotated[
    int, typer.Option(min=1, help="GPUs of a host: one trainer process has those of one host")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]


class ServiceName(StrEnum):
    scheduler = "scheduler"
    rollout = "rollout"
    reward = "reward"
    trainer = "trainer"


@app.command()
def up(
    recipe: RecipeFile,
    steps: Annotated[
        int | None, typer.Option(help="optimizer steps, in place of the recipe's")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="seed, in place of the recipe's")] = None,
    run: Annotated[str | None, typer.Option(help="the run's name, not the recipe's")] = None,
    name: Annotated[str | None, typer.Option(hidden=True)] = None,
    order: Annotated[
        str | None, typer.Option(help="arrival, or index for the same bytes each time")
    ] = None,
    rollout_workers: Annotated[int | None, typer.Option(help="how many rollout workers")] = None,
    can_train: Annotated[
        bool | None, typer.Option(help="rollout workers help a trainer that is behind")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="pipelined, colocated (one device), or naive for comparison")
    ] = None,
    tag: Annotated[
        str | None, typer.Option(help="auto, off, or how many groups the trainer generates")
    ] = None,
    staleness: Annotated[
        str | None, typer.Option(help="0, or 1 to begin the next batch before the step")
    ] = None,
    early_fraction: Annotated[
        str | None, typer.Option(help="of the next batch that may be begun early, or auto")
    ] = None,
    fragment_size: Annotated[
        str | None, typer.Option(help="samples that a device generates at a time, or auto")
    ] = None,
    tsp_steps: Annotated[
        str | None, typer.Option(help="denoising steps per training pass, or auto")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the run's newest commit")
    ] = False,
    port: Annotated[int, typer.Option(help="of the scheduler's API; 0 takes a free one")] = 0,
    runs: Annotated[Path, typer.Option(help="folder of all runs")] = Path("runs"),
    tensorboard: TensorBoardFolder = None,
    wandb: WandbProject = None,
) -> None:
    """Run a recipe on this machine: brokers, services and report, without Docker."""
    from digenrl.follow.steps import Targets
    from digenrl.local.preflight import Request, prepare, resuming
    from digenrl.local.up import run_locally

    overrides = {
        "run.steps": steps,
        "run.seed": seed,
        "run.name": run or name,
        "trainer.order": order,
        "rollout.workers": _rollout_workers(rollout_workers, mode),
        "rollout.can_train": can_train,
        "schedule.mode": mode,
        "schedule.tag": _number(tag),
        "schedule.max_staleness": _number(staleness),
        "schedule.early_fraction": _number(early_fraction),
        "schedule.fragment_size": _number(fragment_size),
        "schedule.tsp_steps": _number(tsp_steps),
    }
    request = Request(
        recipe, overrides, resume=resume, port=port, runs=runs.resolve(),
        targets=Targets(tensorboard, wandb), again=resuming(sys.argv),
    )  # fmt: skip
    raise typer.Exit(asyncio.run(run_locally(prepare(request))))


def _rollout_workers(asked: int | None, mode: str | None) -> int | None:
    """Colocated, the trainer's device is all there needs to be."""
    return 0 if asked is None and mode == "colocated" else asked


def _number(text: str | None) -> str | int | float | None:
    """A number if it is one; the recipe says what else it may be."""
    if text is None:
        return None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


@app.command()
def check(
    recipe: RecipeFile,
    devices: Annotated[
        str | None, typer.Option(help="kind=count, e.g. h100=8: what it would take on them")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="cost profile; by default the one named like the model")
    ] = None,
    host_gpus: HostGpus = 8,
    elsewhere: Annotated[
        bool, typer.Option("--elsewhere", help="model and rewards are on other hosts")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say whether a recipe can run, without starting anything."""
    from digenrl.local.check import check as check_recipe
    from digenrl.local.check import failed_as_json

    try:
        checked = check_recipe(recipe, devices, profile, host_gpus=host_gpus, elsewhere=elsewhere)
    except UserError as error:
        if as_json:
            typer.echo(failed_as_json(recipe, error))
        raise
    typer.echo(checked.as_json if as_json else "\n".join(checked.lines))


@app.command()
def serve(
    service: Annotated[ServiceName, typer.Argument(help="which service this process is")],
    run: Annotated[str, typer.Option(envvar="DIGENRL_RUN", help="name of the run")] = "",
    worker: Annotated[
        str, typer.Option(help="name of this worker; by default host and process")
    ] = "",
    recipe: Annotated[Path | None, typer.Option(help="scheduler only: the run's recipe")] = None,
    steps: Annotated[int | None, typer.Option(help="scheduler only: optimizer steps")] = None,
    host: Annotated[str, typer.Option(help="address of its HTTP side")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(help="port of its HTTP side; the scheduler's is 8000, workers take free ones"),
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="workers: outlive a finished run, for when it is resumed")
    ] = False,
) -> None:
    """Run one service in this process; endpoints come from DIGENRL_* variables."""
    from digenrl.commands.serving import serve_scheduler, serve_worker

    if service is ServiceName.scheduler:
        serve_scheduler(recipe, run=run, steps=steps, host=host, port=port)
    else:
        serve_worker(service.value, run=run, worker=worker, host=host, port=port, stay=stay)


@app.command()
def generate(
    recipe: RecipeFile,
    prompt: Annotated[list[str], typer.Option(help="what to make; may be given several times")],
    out: Annotated[Path, typer.Option(help="folder for the files")],
    adapter: Annotated[
        Path | None, typer.Option(help="an exported adapter; without it, the base model")
    ] = None,
    num: Annotated[int, typer.Option(min=1, max=1024, help="samples of each prompt")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="of the noise")] = 0,
) -> None:
    """Make images or videos with a recipe's model and a trained adapter."""
    from shared.process.worker_process import prepare_libraries
    from shared.recipe.recipe import load_recipe

    loaded = load_recipe(recipe)
    prepare_libraries(loaded, threads=loaded.rollout.threads)
    from digenrl.report.generate import generate as make

    for path in make(loaded, adapter, prompt, num_each=num, seed=seed, out=out):
        typer.echo(path)


@app.command("serve-scorer")
def serve_scorer(
    type: Annotated[str, typer.Argument(help="which scorer; docs/rewards.md lists them")],
    folder: Annotated[Path | None, typer.Option(help="where its weights are")] = None,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8100,
) -> None:
    """Offer a scorer over HTTP, for recipes that name it as type "remote"."""
    from digenrl.commands.serving import serve_one_scorer

    serve_one_scorer(type, folder, host=host, port=port)


class Variant(StrEnum):
    lora = "lora"
    full = "full"


class Mode(StrEnum):
    pipelined = "pipelined"
    naive = "naive"


ProfileVariant = Annotated[Variant, typer.Option(help="what is trained")]


@app.command()
def plan(
    devices: Annotated[str, typer.Option(help="kind=count, e.g. h100=16,a100=16")],
    recipe: Annotated[
        Path | None, typer.Argument(help="a recipe, for its batch and its schedule")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="cost profile; by default the one named like the model")
    ] = None,
    variant: ProfileVariant = Variant.lora,
    staleness: Annotated[
        int | None, typer.Option(min=0, max=1, help="0 or 1, in place of the recipe's")
    ] = None,
    host_gpus: HostGpus = 8,
    as_json: AsJson = False,
) -> None:
    """Say which devices should generate and which should train, and what that gains."""
    from digenrl.planning.output import plan_as_json, show_plan, wide_console
    from digenrl.planning.requests import plan as find_plan

    found = find_plan(
        recipe, devices, profile=profile, variant=variant.value,
        staleness=_zero_or_one(staleness), host_gpus=host_gpus,
    )  # fmt: skip
    if as_json:
        typer.echo(plan_as_json(found))
    else:
        show_plan(found, wide_console())


@app.command()
def sim(
    profile: Annotated[str, typer.Option(help="cost profile: a name, or a JSON file")],
    rollout: Annotated[str, typer.Option(help="devices that generate, kind=count,...")],
    trainer: Annotated[str, typer.Option(help="devices that train, kind=count,...")],
    variant: ProfileVariant = Variant.lora,
    mode: Annotated[Mode, typer.Option(help="naive: generate all, then train all")] = (
        Mode.pipelined
    ),
    staleness: Annotated[int, typer.Option(min=0, max=1, help="0 or 1")] = 0,
    tag: Annotated[str, typer.Option(help="auto, off, or at most so many groups")] = "auto",
    fragment_size: Annotated[str, typer.Option(help="samples, or auto")] = "auto",
    tsp: Annotated[bool, typer.Option(help="time-step parallelism in training")] = True,
    batches: Annotated[int, typer.Option(help="that are measured")] = 8,
    seed: Annotated[int, typer.Option(help="of the devices' noise")] = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="add one technique after the other")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a split of devices in the simulator: step time, utilisation, and who waits for whom."""
    from digenrl.planning.output import show_simulated, simulated_as_json, wide_console
    from digenrl.planning.requests import SimRequest, simulated

    request = SimRequest(
        profile=profile,
        variant=variant.value,
        rollout=rollout,
        trainer=trainer,
        mode=mode.value,
        staleness=_zero_or_one(staleness) or 0,
        tag=tag,
        fragment_size=fragment_size,
        tsp=tsp,
        batches=batches,
        seed=seed,
    )
    found = simulated(request, comparing=compare)
    if as_json:
        typer.echo(simulated_as_json(found))
    else:
        show_simulated(found, wide_console())


def _zero_or_one(value: int | None) -> Literal[0, 1] | None:
    return None if value is None else 1 if value else 0


@model.command()
def digits(
    folder: Annotated[Path, typer.Option(help="where the diffusers folder goes")] = Path(
        "models/digits"
    ),
    rewards: Annotated[Path, typer.Option(help="where the judges go")] = Path(
        "models/digits-rewards"
    ),
    seed: Annotated[int, typer.Option(help="of everything that is random")] = 0,
) -> None:
    """Train the demo's generator and its judges from scikit-learn's digits."""
    from digenrl.digits.build import build_model

    build_model(folder, rewards, seed=seed, report=typer.echo)


@model.command()
def reward(
    reward: Annotated[str, typer.Argument(help="aesthetic, hpsv2 or image-reward")],
    weights: Annotated[Path, typer.Argument(help="the file that its authors publish")],
    like: Annotated[
        Path, typer.Option(help="its CLIP as transformers has it; of image-reward, its tokenizer")
    ],
    out: Annotated[Path, typer.Option(help="folder to make, for the recipe to name")],
) -> None:
    """Make the folder of a reward from its published weights."""
    from digenrl.commands.reward_weights import Reward, make_folder

    if reward not in list(Reward):
        raise UserError(f"REWARD: {reward!r}; known are: {', '.join(Reward)}")
    make_folder(Reward(reward), weights, like, out)


def main() -> None:
    run_command(app)


def run_command(command: typer.Typer) -> None:
    """Run a command; errors that a user can mend are one line and exit code 2, others of ours 1."""
    try:
        command()
    except UserError as error:
        typer.echo(f"digenrl: {error}", err=True)
        sys.exit(EXIT_USER_ERROR)
    except DigenRLError as error:
        typer.echo(f"digenrl: {error}", err=True)
        sys.exit(EXIT_FAILED)
