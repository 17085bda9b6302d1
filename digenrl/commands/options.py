"""Options that several commands share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from digenrl.local.runs import DEFAULT, runs_folder, runs_in
from shared.errors import UserError

if TYPE_CHECKING:
    from shared.process.settings import HttpSettings, ServiceSettings

S = TypeVar("S")


def recipe_file(given: Path | None) -> Path | None:
    """Return the recipe that a command names: a file, or one that comes with DigenRL."""
    from shared.recipe.files import located

    return None if given is None else located(given)


RecipeFile = Annotated[
    Path,
    typer.Argument(
        help="the run's recipe: a TOML file, or the name of one that comes with DigenRL",
        callback=recipe_file,
    ),
]
HostGpus = Annotated[int, typer.Option(min=1, help="GPUs per host where only GPUs are counted")]
Hosts = Annotated[
    str | None, typer.Option(help="hosts by kind and GPUs, e.g. h100x8*4 or h100x8*2+a100x8*2")
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        help="GiB of memory of each host of a kind whose workers stream the network, e.g. 4090=128"
    ),
]
LaunchUs = Annotated[
    str | None,
    typer.Option(
        help="microseconds in which hosts launch a kernel, in a step and in training, as doctor "
        "measures them, e.g. 20.8,30; by default devices set the pace"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]
ProfileVariant = Annotated[Literal["lora", "full"], typer.Option(help="trained weights")]
TensorBoardFolder = Annotated[
    Path | None, typer.Option(help="TensorBoard folder, for a curve of each metric")
]
WandbProject = Annotated[
    str | None, typer.Option(help="Weights & Biases project; offline with WANDB_MODE=offline")
]


def complete_run_names(incomplete: str) -> list[str]:
    """Return the names of the runs of `digenrl up`, for the shell's completion."""
    names = [each.name for each in runs_in(runs_folder())]
    return sorted(name for name in names if name.startswith(incomplete))


def _check_runs_folder(given: Path) -> Path:
    """Raises UserError if the path cannot be a folder."""
    if any(path.exists() and not path.is_dir() for path in (given, *given.parents)):
        raise UserError(f"--runs: {given} is no folder; name one, which need not exist yet")
    return given


RUNS = DEFAULT
RUN_HELP = "a run's name, its folder, or its prefix in a store (s3://bucket/run)"


def _run(metavar: str = "[RUN]", default: str = "") -> Any:
    return typer.Argument(
        metavar=metavar, help=RUN_HELP + default, autocompletion=complete_run_names
    )


RunName = Annotated[str, _run("RUN")]
RunArgument = Annotated[str, _run(default="; by default the newest run")]
RunToChange = Annotated[str, _run(default="; by default the only one")]
RunOption = Annotated[str, typer.Option(envvar="DIGENRL_RUN", help="like RUN")]


def _runs_to_write(names: list[str]) -> list[str]:
    """Raises UserError for a name that is no run's: a `*` in a rule would match every run."""
    from shared.messages.records import token

    return [token(name, field="--run") for name in names]


RunsToWrite = Annotated[
    list[str],
    typer.Option(
        "--run",
        envvar="DIGENRL_RUN",
        callback=_runs_to_write,
        help="run that roles may write to in the object store; may be repeated",
    ),
]
SchedulerAddress = Annotated[
    str,
    typer.Option(
        "--scheduler",
        help="address of the scheduler's API, or of the run's page; a run of `digenrl up` is found",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="file with a token for it; by default DIGENRL_API_TOKEN, or the run's own"),
]
Runs = Annotated[
    Path,
    typer.Option(
        envvar="DIGENRL_RUNS",
        callback=_check_runs_folder,
        help="folder with the runs of `digenrl up`",
    ),
]
MAX_PORT = 65_535
Port = Annotated[
    int, typer.Option(min=0, max=MAX_PORT, help="port to listen on; 0 takes a free one")
]
OpenApi = Annotated[bool, typer.Option("--open-api", help="require no token: on a laptop")]
PlainHttp = Annotated[
    bool, typer.Option("--plain-http", help="listen beyond this machine without TLS")
]


def zero_or_one(value: int | None) -> Literal[0, 1] | None:
    return None if value is None else 1 if value else 0


def settings_from_options(**given: Any) -> "ServiceSettings":
    """Return the settings of a service from options and from the environment.

    Raises:
        UserError: if a value is invalid; names the option and the variable.
    """
    from shared.process.settings import ServiceSettings

    return _settings(ServiceSettings, given)


def http_settings(**given: Any) -> "HttpSettings":
    """Return the settings of an HTTP API; raises UserError as `settings_from_options` does."""
    from shared.process.settings import HttpSettings

    return _settings(HttpSettings, given)


def _settings(kind: "type[S]", given: "dict[str, Any]") -> "S":
    """Options that are not given leave the environment's values."""
    from pydantic import ValidationError

    from shared.messages.records import TOKEN_PATTERN, TOKEN_WORDS

    try:
        values = {
            key: value
            for key, value in given.items()
            if value is not None and value is not False and value != ""
        }
        return kind(**values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        text = first["msg"].removeprefix("Value error, ")
        fault = text[0].lower() + text[1:]
        if first.get("ctx", {}).get("pattern") == TOKEN_PATTERN:
            fault = f"{first['input']!r} is not a name; use {TOKEN_WORDS}"
        raise UserError(f"--{name} or DIGENRL_{name.upper()}: {fault}") from error
