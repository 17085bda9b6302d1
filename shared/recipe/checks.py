"""Checks across the tables of a recipe: batch arithmetic, and combinations of devices.

Each raises ValueError, which names the field and the remedy.
"""

from shared.errors import Faults
from shared.learning.algorithms import ALGORITHMS
from shared.limits import MAX_FRAGMENTS_PER_GROUP, MAX_MEMBERS, MAX_MESSAGE_BYTES, MAX_SCORERS
from shared.messages.codec import group_bytes
from shared.recipe.fields import check_at_most, check_divides
from shared.recipe.rewards import check_evaluation
from shared.recipe.tables import Tables


def check_tables(tables: Tables) -> None:
    """Raises ValueError with a line for each check that fails."""
    faults = Faults()
    for check in CHECKS:
        with faults.collected():
            check(tables)
    faults.raise_any(ValueError)


def too_many_devices(devices: int) -> str | None:
    """Return why this many devices cannot train together, with field and remedy; None if they
    can."""
    if devices <= MAX_MEMBERS:
        return None
    return (
        f"trainer.devices: sums of more than {MAX_MEMBERS} devices fit no message; set it to at "
        f"most {MAX_MEMBERS}"
    )


def _check_batch(tables: Tables) -> None:
    size = tables.batch.group_size
    best_of = tables.algorithm.best_of
    if best_of is not None:
        check_at_most(best_of, size, "algorithm.best_of", "batch.group_size")
        if ALGORITHMS[tables.algorithm.name].pairs:
            raise ValueError(
                f"algorithm.best_of: {tables.algorithm.name} trains one pair of each group; leave "
                "it out"
            )
    if isinstance(tables.trainer.micro_batch, int):
        _check_trained(tables, tables.trainer.micro_batch, "trainer.micro_batch")


def _check_fragments(tables: Tables) -> None:
    fragment, size = tables.schedule.fragment_size, tables.batch.group_size
    if isinstance(fragment, int):
        check_divides(fragment, size, "schedule.fragment_size", "batch.group_size")
        if size // fragment > MAX_FRAGMENTS_PER_GROUP:
            smallest = -(-size // MAX_FRAGMENTS_PER_GROUP)
            raise ValueError(
                f"schedule.fragment_size: too small for this group; at least {smallest}"
            )


def _check_pieces(tables: Tables) -> None:
    check_at_most(
        tables.schedule.tsp_steps, tables.sampling.window, "schedule.tsp_steps", "sampling.window"
    )
    check_at_most(tables.schedule.tag, tables.batch.groups, "schedule.tag", "batch.groups")


def _check_adapter(tables: Tables) -> None:
    if tables.model.adapter is None:
        if tables.algorithm.reference == "adapter":
            raise ValueError(
                'algorithm.reference: "adapter" refers to model.adapter, which is not set; '
                'use "base", or leave it out'
            )
    elif tables.model.trained == "full":
        raise ValueError(
            "model.adapter: applies to LoRA only, and this run trains all weights; leave it out "
            'and merge it into model.folder, or set model.trained to "lora"'
        )


def _check_best(tables: Tables) -> None:
    table = tables.evaluation
    if tables.run.keep_best and not table.every:
        raise ValueError(
            "run.keep_best: compares versions by what is measured during the run; set "
            "evaluation.every"
        )
    if tables.run.stop_at is not None and not (table.every and (table.scorers or table.digits)):
        raise ValueError(
            "run.stop_at: is reached by gold rewards measured during the run; set evaluation.every "
            "and [[evaluation.scorers]]"
        )


def _check_guidance(tables: Tables) -> None:
    if tables.algorithm.cfg_gradient == "conditional" and tables.model.guidance <= 1:
        raise ValueError(
            f"algorithm.cfg_gradient: without classifier-free guidance (model.guidance "
            f"{tables.model.guidance:g}) there is no unconditional half; leave it out"
        )


def _check_variant(tables: Tables) -> None:
    variants = ALGORITHMS[tables.algorithm.name].variants
    if tables.sampling.variant not in variants:
        raise ValueError(
            f"sampling.variant: {tables.algorithm.name} does not sample with "
            f"{tables.sampling.variant!r}; use {' or '.join(map(repr, variants))}"
        )


def _check_noise(tables: Tables) -> None:
    """Stochastic steps can be configured only for a stochastic sampler. Without it, samples that
    begin at one noise are all the same."""
    name, sampling = tables.algorithm.name, tables.sampling
    without = {
        "shared_noise": sampling.shared_noise,
        "stochastic": sampling.stochastic == "all",
        "state_dtype": sampling.state_dtype != "float32",
    }
    if not ALGORITHMS[name].has_window:
        for key in (key for key, is_set in without.items() if is_set):
            raise ValueError(
                f"sampling.{key}: {name} samples without stochastic steps; leave it out, or choose "
                "another algorithm.name"
            )
    if tables.trainer.is_sharded and tables.sampling.trained == "random" and sampling.shared_noise:
        raise ValueError(
            "trainer.shard_devices: devices that share weights take the same passes, and samples "
            "that are trained at steps of their own share their first one or not; set it to 1, or "
            "sampling.shared_noise to false"
        )


def _check_generating(tables: Tables) -> None:
    """Some device has to generate, and in mode colocated only the devices that train do."""
    colocated = tables.schedule.mode == "colocated"
    if not tables.rollout.workers and not tables.schedule.members_generate:
        raise ValueError(
            'rollout.workers: 0 needs schedule.mode "fluid" or "colocated"; otherwise start at '
            "least 1"
        )
    if colocated and tables.rollout.workers:
        raise ValueError(
            'rollout.workers: with schedule.mode "colocated" the trainer\'s devices generate '
            'everything; set it to 0, or schedule.mode to "fluid"'
        )


def _check_members(tables: Tables) -> None:
    reason = too_many_devices(tables.trainer.devices)
    if reason is not None:
        raise ValueError(reason)


def _check_shard_groups(tables: Tables) -> None:
    trainer, field = tables.trainer, "trainer.shard_devices"
    if not trainer.is_sharded:
        return
    check_divides(trainer.shard_devices, trainer.devices, field, "trainer.devices")
    if trainer.deterministic and tables.rollout.workers and tables.schedule.trainer_generates:
        raise ValueError(
            "trainer.deterministic: ranks take fewer samples of a fragment at a time than rollout "
            'workers, and round otherwise; set rollout.workers to 0, or schedule.tag to "off" with '
            'schedule.mode "disaggregated", so that groups only train'
        )


def _check_updates(tables: Tables) -> None:
    if tables.trainer.updates == 1:
        return
    check_divides(tables.trainer.updates, tables.batch.groups, "trainer.updates", "batch.groups")
    if tables.keeps_batch_start and tables.model.trained == "full":
        raise ValueError(
            "trainer.updates: the decoupled loss keeps the adapter of the batch's start; set "
            'it to 1, algorithm.stale_loss to "bypass", or model.trained to "lora"'
        )


def _check_old_policy(tables: Tables) -> None:
    if not tables.keeps_old_policy:
        return
    key, remedy = "algorithm.nft_decay", "or nft_decay to 0"
    if not tables.algorithm.nft_decay:
        key, remedy = "trainer.updates", "or updates to 1"
    if tables.model.trained == "full":
        raise ValueError(
            f'{key}: the old policy is an adapter of its own; set model.trained to "lora", {remedy}'
        )
    if tables.trainer.is_sharded:
        raise ValueError(
            f"{key}: devices do not share the old policy; set trainer.shard_devices to 1, {remedy}"
        )


def _check_exchange(tables: Tables) -> None:
    trainer, levels = tables.trainer, {k: v for k, v in tables.exchange if v != "exact"}
    for key, level in levels.items():
        remedies = {
            "trainer.deterministic to false": level == "auto" and trainer.deterministic,
            "trainer.shard_devices to 1": trainer.is_sharded,
            'model.trained to "lora"': tables.model.trained == "full",
            "algorithm.nft_decay to 0": key == "down" and tables.algorithm.nft_decay > 0,
            'trainer.exchange to "store"': key == "up" and trainer.exchange == "group",
        }
        for remedy in (each for each, is_needed in remedies.items() if is_needed):
            raise ValueError(
                f'exchange.{key}: "{level}" does not go with {remedy.split()[0]} as it is; '
                f'set it to "exact", or {remedy}'
            )


def _check_full(tables: Tables) -> None:
    if tables.model.trained == "lora":
        return
    if tables.model.dtype == "float16":
        raise ValueError(
            "model.dtype: gradients of all weights underflow in float16; use "
            '"bfloat16" or "float32", or model.trained "lora"'
        )
    if tables.keeps_reference and tables.trainer.is_sharded:
        raise ValueError(
            "trainer.shard_devices: devices do not share the weights that all weights are compared "
            "with (algorithm.kl_beta, or dpo); set it to 1, algorithm.kl_beta to 0, or "
            'model.trained to "lora"'
        )


def _check_quantised(tables: Tables) -> None:
    form = tables.model.weights
    if form is None:
        return
    if tables.model.trained == "full":
        raise ValueError(
            f'model.weights: an adapter is trained on "{form}" weights, and no weight of theirs; '
            'leave it out, or set model.trained to "lora"'
        )
    if tables.trainer.is_sharded:
        raise ValueError(
            f'trainer.shard_devices: devices do not share "{form}" weights; set it to 1, or leave '
            "model.weights out"
        )


def _check_streamed(tables: Tables) -> None:
    trainer = tables.trainer
    key = "trainer.memory" if trainer.memory == "streamed" else "rollout.memory"
    if tables.model.trained == "full" and "streamed" in (trainer.memory, tables.rollout.memory):
        raise ValueError(
            f"{key}: weights that are trained stay on the device, and all are; set it to "
            '"resident", or model.trained to "lora"'
        )
    if trainer.memory == "resident":
        return
    if not trainer.gradient_checkpointing:
        raise ValueError(
            f"{key}: blocks would stay on the device until the backward pass has used them; set "
            'trainer.gradient_checkpointing to true, or trainer.memory to "resident"'
        )
    if trainer.is_sharded:
        raise ValueError(
            f"{key}: devices that share the weights hold a part of them each; set "
            'trainer.shard_devices to 1, or trainer.memory to "resident"'
        )


def _check_compiled(tables: Tables) -> None:
    if tables.model.compile is None:
        return
    if tables.model.compile == "auto" and tables.trainer.deterministic:
        raise ValueError(
            'model.compile: "auto" depends on timings, and trainer.deterministic allows none; set '
            'it to "regional", or leave it out'
        )
    moves = "the blocks' weights come and go between their calls"
    for field, is_set, otherwise in (
        ("trainer.memory", tables.trainer.memory == "streamed", 'set it to "resident"'),
        ("rollout.memory", tables.holding.memory == "streamed", 'set it to "resident"'),
        ("trainer.shard_devices", tables.trainer.is_sharded, "set it to 1"),
        ("algorithm.kl_beta", tables.trained_sets.on_host > 0, "compare with no reference"),
    ):
        if is_set:
            raise ValueError(f"{field}: {moves}, {otherwise}, or leave model.compile out")


def _check_weights(tables: Tables) -> None:
    """Samples of other weights than the trainer's need a weight for each row."""
    if tables.largest_weight is None:
        return
    method, weights = ALGORITHMS[tables.algorithm.name], f'"{tables.rollout.weights}"'
    if tables.model.trained == "full":
        raise ValueError(
            "rollout.weights: every version of all weights would be converted again; leave it "
            'out, or set model.trained to "lora"'
        )
    if method.has_ratio and not method.corrects_staleness:
        raise ValueError(
            f"rollout.weights: {tables.algorithm.name} has no weight for samples of another "
            "network; leave it out, or choose another algorithm.name"
        )
    goes_stale = tables.schedule.staleness_limit > 0 or tables.trainer.updates > 1
    if goes_stale and method.has_ratio and tables.algorithm.stale_loss == "bypass":
        raise ValueError(
            f'algorithm.stale_loss: "bypass" would clip by how far {weights} weights are from the '
            'trainer\'s; use "decoupled"'
        )


def _check_messages(tables: Tables) -> None:
    """A group with all its scores goes to the trainer as one message."""
    scorers, size = len(tables.reward.scorers), tables.batch.group_size
    if scorers > MAX_SCORERS:
        raise ValueError(f"reward.scorers: {scorers} are too many; at most {MAX_SCORERS}")
    fixed = tables.schedule.fragment_size
    step = fixed if isinstance(fixed, int) else 1

    def fits(samples: int) -> bool:
        fragments = min(samples // step, MAX_FRAGMENTS_PER_GROUP)
        return group_bytes(samples, fragments, scorers) <= MAX_MESSAGE_BYTES

    if not fits(size):
        most = max(samples for samples in range(0, size, step) if fits(samples))
        raise ValueError(
            f"batch.group_size: {size} samples with {scorers} scores each are more than a message "
            f"takes; at most {most}, or fewer reward.scorers"
        )


def _check_scorers(tables: Tables) -> None:
    size, slot = tables.batch.group_size, tables.schedule.slot_deadline_s
    for scorer in tables.reward.scorers:
        field = f"reward.scorers.{scorer.name}"
        if scorer.scores == "groups":
            if tables.run_schedule.fixed_fragment != size:
                raise ValueError(
                    f"{field}.scores: a whole group is scored if one device generates it; set "
                    f"schedule.fragment_size to batch.group_size, {size}"
                )
            if scorer.type == "remote" and scorer.remote.batch < size:
                raise ValueError(
                    f"{field}.remote.batch: a request holds {scorer.remote.batch} samples, and a "
                    f"group has {size}; raise it to {size}"
                )
        if slot != "auto" and scorer.longest_s > slot:
            raise ValueError(
                f"{field}.patience: calls that hang may take {scorer.longest_s:g} s of a "
                f"fragment, and schedule.slot_deadline_s is {slot:g}; lower the value to "
                f"{scorer.patience * slot / scorer.longest_s:g}, or raise that"
            )


def _check_trained(tables: Tables, part: int, field: str) -> None:
    whole = "batch.group_size" if tables.algorithm.best_of is None else "algorithm.best_of"
    if ALGORITHMS[tables.algorithm.name].pairs:
        whole = f"the one pair of a group that {tables.algorithm.name} trains"
    check_divides(part, tables.trained_samples, field, whole)


CHECKS = (
    _check_batch, _check_fragments, _check_messages, _check_scorers, _check_pieces,
    _check_generating, _check_members, _check_shard_groups, _check_full, _check_exchange,
    _check_updates, _check_old_policy, _check_quantised, _check_streamed, _check_compiled,
    _check_weights,
    _check_variant, _check_noise, _check_guidance, _check_best,
    _check_adapter, lambda tables: check_evaluation(tables.evaluation, tables.sampling),
)  # fmt: skip
"""Each is independent of the others and raises ValueError for one fault."""
