"""Makes the first recipe for a user's model, prompts and reward: `digenrl init`.

Settings start as in the shipped recipe of the model's family. Then the devices of this machine
decide how the model is held, and which devices generate and train.
"""

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from digenrl.local.checking.check import trace_model
from digenrl.local.checking.inputs import check_folder
from digenrl.local.checking.verdict import gpu_kinds
from digenrl.local.processes.gpus import visible_cards
from digenrl.planning.forecast import has_profile
from digenrl.planning.plan import advised_keys, plan
from digenrl.trace.profile import traced_profile, write_profile
from digenrl.training import DEFAULTS, model_key
from services.reward.kinds import KINDS, kind_named
from services.reward.scorer import check_packages, scorer_kind
from services.scheduler.costs.profile import load_profile
from services.scheduler.costs.recipes import profile_for
from shared.errors import Faults, UserError
from shared.learning.prompts import MIN_PROMPTS, num_different, read_rows
from shared.models import catalogue
from shared.models.hub import place
from shared.models.published import PUBLISHED, alike
from shared.recipe import files
from shared.recipe.options import put_options
from shared.recipe.recipe import Recipe, load_recipe, resolve
from shared.recipe.rewards import PYTHON, ScorerTable
from shared.recipe.toml import explained_toml

KEPT = ("model", "sampling", "batch", "algorithm", "trainer", "schedule", "rollout")
"""Tables of a recipe that comes with DigenRL which a first recipe begins with."""
ONE_DEVICE: Mapping[str, Any] = {
    "run.steps": 200, "trainer.devices": 1, "trainer.shard_devices": 1, "rollout.workers": 0,
    "schedule.mode": "fluid", "reward.workers": 1,
}  # fmt: skip
CPU_PIXELS = 64
ON_CPU: Mapping[str, Any] = {
    "model.device": "cpu", "model.dtype": "float32", "sampling.state_dtype": "float32",
    "run.steps": 20, "batch.groups": 4, "batch.group_size": 8, "trainer.learning_rate": 1e-3,
}  # fmt: skip
CPU_FRAMES = 9
"""Frames of a video on a CPU, which every family can make."""
HELD_OUT_SHARE = 5
"""One prompt in five is held out, while there are too few for the default."""
DATA_FILES = (".txt", ".jsonl", ".json", ".csv", ".parquet")


OPTIONS = {
    r"model\.(?:folder|id)": "--model", r"data\.prompts": "--prompts", r"run\.name": "--out",
    r"reward\.scorers[^\s:]*|--reward\.type": "--reward", r'source = "([^"]*)"': r"--reward \1",
}  # fmt: skip
"""Patterns of keys that errors of a recipe name, and the options that were typed for them."""


class InitRequest(NamedTuple):
    model: str
    prompts: Sequence[str]
    rewards: Sequence[str]
    out: Path
    options: Mapping[str, Any]
    """Values of further keys, by their dotted names."""

    @property
    def typed_prompts(self) -> Path:
        """File for prompts that are typed."""
        return self.out.with_suffix(".prompts.txt")

    def name_options(self, errors: str) -> str:
        """Return errors of the recipe with the names of options in place of keys."""
        typed = {re.escape(key): f"--{key}" for key in self.options}
        for key, option in (typed | OPTIONS | typed).items():
            errors = re.sub(rf"(?<![\w.-])(?:{key})(?!\.?\w)", option, errors)
        return errors.replace(f"{self.out}: ", "")


def first_tables(request: InitRequest) -> dict[str, Any]:
    """Return the tables of a recipe for one device; write typed prompts to a file next to it.

    Raises:
        UserError: with a line for each fault of the inputs.
    """
    faults, keys, scorers = Faults(), dict(ONE_DEVICE), list[dict[str, str]]()
    out_faults = _out_faults(request.out)
    start: Mapping[str, Any] = {}
    with faults.collected():
        keys |= model_key(request.model)
        folder = _model_folder(request.model)
        start = _start(folder)
        keys |= _on_this_machine(start, folder, request.options)
    with faults.collected():
        keys |= _prompts(request)
    for given in request.rewards or ("",) * ("reward.scorers" not in request.options):
        with faults.collected():
            scorers.append(_scorer(given))
    faults += out_faults
    typed = {key: each for key, each in request.options.items() if ".scorers" not in key}
    with faults.collected():
        load_recipe(files.SHIPPED / "digits.toml", typed)  # checks values, for any model
    faults.raise_any()
    keys["run.name"] = re.sub(r"[^A-Za-z0-9_-]+", "-", request.out.stem).strip("-") or "first"
    tables = put_options(start, {**keys, "reward.scorers": scorers, **request.options})
    here, paths = request.out.resolve().parent, files.key_paths(tables)
    below = {key: path for key, path in paths.items() if Path(path).is_relative_to(here)}
    files.put_paths(tables, {key: str(Path(path).relative_to(here)) for key, path in below.items()})
    return tables


def _out_faults(out: Path) -> list[str]:
    """Make the file of the recipe, or return why it cannot be made."""
    if out.exists() or out.suffix != ".toml":
        return [f"--out: {out} exists, or is no .toml; name another file"]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.touch()
    except OSError as error:
        return [f"--out: {out}: {error.strerror}; name another file"]
    return []


def recipe_from(request: InitRequest, tables: Mapping[str, Any]) -> Recipe:
    """Return the recipe of tables that are not written yet."""
    return resolve(request.out, [files.RecipeLayer(request.out, dict(tables))], {})


def write_recipe(request: InitRequest, tables: Mapping[str, Any], devices: str) -> None:
    """Write the recipe, in which every key has its meaning."""
    head = (
        f"# {request.model} on {devices}, made by `digenrl init`.",
        f"# Start it with: digenrl up {shlex.quote(str(request.out))}",
        "# `digenrl recipe keys WORD` explains further keys.",
    )
    lines = (*head, *explained_toml(tables, Recipe))
    request.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def fit_to_gpus(
    request: InitRequest, tables: dict[str, Any], recipe: Recipe, say: Callable[[str], None]
) -> tuple[dict[str, Any], str, str | None]:
    """Trace the model where no cost profile has it. Return the tables with the fastest plan for
    this machine's GPUs, the devices in words, and the cost profile of the plan."""
    cards = () if recipe.model.device == "cpu" else visible_cards()
    if cards and has_profile(recipe):
        profile = profile_for(recipe)
    else:
        model_trace = trace_model(recipe, False, bool(cards), say)[2]
        if not cards:
            return tables, "the CPU", None
        profile = str(request.out.with_suffix(".profile.json"))
        write_profile(traced_profile(recipe, model_trace), Path(profile))
    kinds = gpu_kinds([card for card in cards if card.kind], load_profile(profile))
    if kinds is None:
        return tables, f"one of {len(cards)} GPUs, whose kind no cost profile has", None
    advice = plan(recipe, kinds, profile=profile, staleness=None, host_gpus=len(cards))
    best = advice.planned.best
    keys = advised_keys(advice.placement, best.split, best.schedule, recipe)
    return put_options(tables, keys), kinds, profile


def _model_folder(model: str) -> Path:
    if not model:
        raise UserError("--model: missing; name a diffusers folder, or ORG/NAME on the hub")
    is_id = "model.id" in model_key(model)
    folder = place(model, None) if is_id else Path(model).resolve()
    if not (is_id or folder.is_dir()):
        raise UserError(f"--model: no folder {folder}; correct it, or name ORG/NAME on the hub")
    check_folder(folder)
    catalogue.check_family(folder)
    catalogue.check_weights(folder)
    catalogue.check_parts(folder)
    return folder


def _start(folder: Path) -> dict[str, Any]:
    """Return tables of the recipe for the same network, otherwise of the first for its pipeline."""
    by_name: dict[str, dict[str, Any]] = {}
    for path in sorted(files.SHIPPED.glob("*.toml"), key=lambda path: -len(path.name)):
        tables = files.merged(files.read_layers(path))
        by_name[Path(tables["model"]["folder"]).name] = tables  # the shortest name is the plain one
    pipeline = catalogue.find_family(folder).pipeline
    same = [
        name for name in sorted(by_name) if (PUBLISHED / name).is_dir()
        and catalogue.find_family(PUBLISHED / name).pipeline == pipeline
    ]  # fmt: skip
    tables = by_name.get(alike(folder, same) or next(iter(same), "")) or put_options({}, DEFAULTS)
    start = {table: dict(tables[table]) for table in KEPT if table in tables}
    start["model"].pop("folder", None)
    evaluation = tables.get("evaluation", {})
    start["evaluation"] = {key: evaluation[key] for key in ("steps", "sigmas") if key in evaluation}
    return start


def _on_this_machine(
    start: Mapping[str, Any], folder: Path, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the size of samples that the model knows, and small batches on a CPU."""
    on_cpu = options.get("model.device") == "cpu" or not visible_cards()
    family, multiple = catalogue.find_family(folder), catalogue.pixels_per_token(folder)
    network = catalogue.PartConfig(folder / "transformer" / "config.json")
    largest = multiple * (family.max_tokens_per_side(network) or CPU_PIXELS * CPU_PIXELS)
    keys: dict[str, Any] = dict(ON_CPU) if on_cpu else {}
    for side in ("height", "width"):
        wanted = CPU_PIXELS if on_cpu else start["model"][side]
        keys[f"model.{side}"] = min(largest, max(multiple, wanted // multiple * multiple))
    if on_cpu:
        keys["trainer.threads"] = os.cpu_count() or 1
        keys |= {"model.frames": CPU_FRAMES} if family.makes_videos else {}
    return keys


def _prompts(request: InitRequest) -> dict[str, Any]:
    """Return the keys of the prompts, of which some are held out for evaluations."""
    given, file = request.prompts, request.typed_prompts
    if not any(each.strip() for each in given):
        raise UserError("--prompts: missing; name a file with a prompt per line, or type prompts")
    path = Path(given[0]).expanduser()
    if len(given) == 1 and (os.path.exists(path) or path.suffix in DATA_FILES):  # noqa: PTH110
        file = path
    elif file.exists():
        raise UserError(f"--prompts: {file} exists; name it, or move it away")
    else:
        with suppress(OSError):  # which is a fault of --out
            file.write_text("".join(f"{each}\n" for each in given), encoding="utf-8")
    if not file.exists():
        raise UserError(f"--prompts: no file {file}; correct its name, or type prompts")
    number = num_different(read_rows(file))
    held_out = {"evaluation.held_out": number // HELD_OUT_SHARE} if number < MIN_PROMPTS else {}
    return {"data.prompts": str(file.resolve()), **held_out}


def _scorer(given: str) -> dict[str, str]:
    """Return the table of a reward as it is typed, if it can be used here or fetched."""
    table = _scorer_table(given)
    scorer = ScorerTable.model_validate(table)
    check_packages(scorer)
    scorer_kind(scorer, here=scorer.folder is None or scorer.folder.exists())
    return table


def _scorer_table(given: str) -> dict[str, str]:
    file, _, function = given.partition(":")
    if file.endswith(".py"):
        path = Path(file).expanduser().resolve()
        return {"name": path.stem, "type": PYTHON, "source": f"{path}:{function or 'score'}"}
    type, _, folder = given.partition("=")
    if not folder and Path(type).name in KINDS:
        type, folder = Path(type).name, type if Path(type).is_dir() else f"models/{type}"
    if not type:
        raise UserError("--reward: missing; name my_reward.py:score, or one of `digenrl rewards`")
    kind = kind_named(type, "--reward")
    if kind.needs not in (None, "folder"):
        raise UserError(f"--reward: {type} needs {kind.needs}; use --reward.scorers (docs/rewards)")
    table = {"name": type, "type": type}
    return {**table, "folder": str(Path(folder).resolve())} if kind.needs else table
