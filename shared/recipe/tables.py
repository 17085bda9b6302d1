"""The tables of a recipe and what follows from them together, before anything is checked."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from shared.learning.advantages import Advantages
from shared.learning.algorithms import ALGORITHMS
from shared.learning.pictures import WHITE
from shared.limits import MAX_GROUP_SIZE, MAX_TEXT
from shared.messages.records import Token
from shared.models.attention import check_backend
from shared.models.hub import ID_PATTERN, REVISION_PATTERN, cached_commit, place
from shared.models.memory import Form, ModelPart, Quantised, Residence, TrainedSets, WeightsHolding
from shared.recipe.dataset import Dataset
from shared.recipe.fields import NonNegative, Positive, Rate, Table
from shared.recipe.rewards import Evaluation, Reward
from shared.recipe.sampling import Algorithm, Sampling
from shared.recipe.schedule import RunSchedule, Schedule
from shared.recipe.trainer import Exchange, Trainer


class Run(Table):
    name: Token
    """Name of the run: letters, digits, `-` and `_`. It is part of every subject, key and path."""
    seed: NonNegative = 0
    """Seed of prompts, noise, windows and the adapter's first values."""
    steps: Positive
    """Optimizer steps. Each step trains one batch."""
    keep_last: Positive = 3
    """Number of newest versions whose weights and checkpoints stay in the object store."""
    keep_every: Positive | None = None
    """Interval in versions: each version that is a multiple of it is kept for good."""
    keep_best: NonNegative | None = None
    """Number of best evaluated versions that are also kept, by gold rewards, or without any by the
    training reward. Default: 1 with `evaluation.every`, otherwise none."""
    stop_at: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Gold figure, as `run.keep_best` compares it, that ends the run early once two evaluations in
    a row have reached it. Default: the run takes all steps. Needs `evaluation.every` and gold
    rewards."""
    preview_mb: Rate = 32.0
    """Megabytes of previews (160 pixels, 8 KiB at most) that stay after media are deleted: of every
    step while space permits, otherwise half for the newest steps and half spread over the run. 0
    keeps no previews."""
    shard_bytes: Positive = 1 << 28
    """Maximum bytes of tensors in one stored object of weights or of a checkpoint. Larger ones are
    stored in shards."""


class Lora(Table):
    rank: Positive = 32
    """Rank of the trained adapter."""
    alpha: Annotated[float, Field(gt=0)] = 64.0
    """Scale of the adapter, which is `alpha / rank`."""
    targets: tuple[str, ...] = ()
    """Suffixes of the names of the modules that get an adapter. Default: set by the model
    family."""
    experts: Literal["both", "high", "low"] = "both"
    """Networks that get an adapter, for a model with one network for high noise and one for low
    noise (Wan2.2)."""


class Model(Table):
    folder: Path
    """Folder of a diffusers model, relative to the recipe. Required unless `model.id` is given."""
    id: Annotated[str, Field(pattern=ID_PATTERN)] | None = None
    """Name of a model on the Hugging Face hub, such as `org/name`, in place of `model.folder`.
    `digenrl fetch` downloads it."""
    revision: Annotated[str, Field(pattern=REVISION_PATTERN)] | None = None
    """Branch, tag or commit of `model.id`; default: main. A run records the commit."""
    height: Positive
    """Height of the samples in pixels."""
    width: Positive
    """Width of the samples in pixels."""
    frames: Positive = 1
    """Number of frames of a video; 1 for images."""
    guidance: Rate = 1.0
    """Guidance scale in sampling and training: classifier-free, or an input of the network (FLUX.1,
    HunyuanVideo). 1 turns it off."""
    negative_prompt: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    """Text that classifier-free guidance leads away from, in sampling and training. By default the
    one that the model's authors publish; the column `negative_prompt` of a prompt goes before."""
    guidance_2: Rate | None = None
    """Guidance scale of the network for low noise (Wan2.2); default: `model.guidance`.
    `model.guidance` decides whether there is guidance at all."""
    text_tokens: Positive | None = None
    """Maximum tokens of a prompt in sampling and training. Longer prompts are cut off; shorter ones
    are padded where the pipeline does not mask the padding. Default: the model family's."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Type of the weights. Latents, log-probs, trained weights and the decoder are at least
    float32."""
    weights: Quantised | None = None
    """Format of the network's weights under a trained adapter, in sampling and training: `int8`,
    `fp8` or `nf4`, dequantised to `model.dtype` for each product. Default: `model.dtype`. Not with
    `model.trained = "full"` or `trainer.shard_devices`. Not run on a GPU yet."""
    device: Literal["cpu"] | None = None
    """`cpu`: no process uses a GPU. Default: each process takes one GPU, where there are any."""
    matmul_precision: Literal["high", "highest"] = "high"
    """Precision of float32 matrix products on a GPU, in sampling and training. `high` rounds
    factors to TF32 and is several times as fast; `highest` does not round."""
    attention: str | None = None
    """Attention backend by its name in diffusers, in sampling and training. Default: torch's
    choice, without cuDNN's."""
    compile: Literal["regional", "auto"] | None = None
    """`regional`: torch.compile compiles the repeated blocks of the network at the first call with
    each shape, in sampling and training. If that fails, the blocks run uncompiled and the log gives
    the reason (`not_compiled`). `auto`: each process on a GPU times one block at its start
    (`compilation_tried`) and compiles the others only if it is faster; on a CPU nothing is
    compiled. Not with streamed weights or with `trainer.shard_devices`; `auto` not
    with `trainer.deterministic`."""
    vae_tiling: bool = False
    """Whether samples are decoded in overlapping tiles. Tiles need less memory for videos and
    change pixels slightly."""
    trained: Literal["lora", "full"] = "lora"
    """`lora` trains an adapter and freezes the weights; `full` trains all weights of the network,
    in float32."""
    lora: Lora = Lora()
    adapter: Path | None = None
    """LoRA from which training starts: a safetensors file or its folder, relative to the recipe,
    with key names of diffusers, peft, Kohya or ComfyUI. Its rank, alpha and targets replace the
    values of `model.lora`; a different value in `model.lora` is refused."""

    @model_validator(mode="before")
    @classmethod
    def _id_has_a_place(cls, plain: Any) -> Any:
        if not isinstance(plain, Mapping) or plain.get("folder") is not None:
            return plain
        name, revision = plain.get("id"), plain.get("revision")
        if name is None:
            raise ValueError("folder: missing; give model.folder, or model.id of one on the hub")
        is_named = isinstance(name, str) and isinstance(revision, str | None)
        return {**plain, "folder": place(name, revision) if is_named else Path()}

    @model_validator(mode="after")
    def _revision_is_of_an_id(self) -> Self:
        if self.revision is not None and self.id is None:
            raise ValueError("revision: needs model.id, which is not set; leave it out")
        return self

    def located(self, base: Path) -> Self:
        """Return the table with the folder that it means on this host, and with its commit."""
        if self.id is None:
            return self.absolute(base, "folder", "adapter")
        folder = place(self.id, self.revision)
        return self.absolute(base, "adapter").model_copy(
            update={"folder": folder, "revision": cached_commit(folder) or self.revision}
        )

    @property
    def name(self) -> str:
        """The name of the model, on the hub or of its folder."""
        return self.folder.name if self.id is None else self.id.rpartition("/")[2]

    @model_validator(mode="after")
    def _attention_trains(self) -> Self:
        if self.attention is not None:
            check_backend(self.attention, self.dtype)
        return self


class Data(Table):
    prompts: Path
    """File or folder of prompts, relative to the recipe: text, JSON lines, CSV, Parquet or a saved
    data set."""
    dataset: Dataset | None = None
    """Data set of the Hugging Face hub, or files of this host whose columns have other names, in
    place of `data.prompts`."""
    weights: Annotated[str, Field(min_length=1)] | None = None
    """Name of a metadata field with the relative frequency of each prompt. Default: all prompts are
    equally frequent."""
    background: Annotated[str, Field(pattern=r"^(white|black|gr[ae]y|#[0-9a-fA-F]{6})$")] = WHITE
    """Colour that source images get where they are transparent: white, black, gray or `#rrggbb`."""

    @model_validator(mode="before")
    @classmethod
    def _dataset_has_a_place(cls, plain: Any) -> Any:
        if isinstance(plain, Mapping) and plain.get("prompts") is None and "dataset" in plain:
            return {**plain, "prompts": Path()}
        return plain

    def located(self, base: Path) -> Self:
        """Return the table with the file that it means on this host, and with a commit."""
        if self.dataset is None:
            return self.absolute(base, "prompts")
        dataset = self.dataset.located(base)
        update = {"prompts": dataset.prompts, "dataset": dataset}
        return self.model_copy(update=update)


class Batch(Table):
    groups: Positive
    """Number of prompts per optimizer step. Each prompt has one group of samples."""
    group_size: Annotated[int, Field(ge=2, le=MAX_GROUP_SIZE)]
    """Number of samples per prompt."""


class Rollout(Table):
    workers: NonNegative = 1
    """Number of rollout workers that `digenrl up` starts. 0 where members generate everything."""
    threads: Positive = 1
    """CPU threads of each rollout worker."""
    media: Literal["lossless", "raw"] = "lossless"
    """Storage of pixels: `lossless` needs half of the bytes or less; `raw` stores them
    uncompressed."""
    memory: Residence | None = None
    """`streamed`: the blocks of the network stay on the host and are copied to the device one after
    another. Samples do not change. `DIGENRL_ROLLOUT_MEMORY` sets it for one worker. Default: as
    `trainer.memory`."""
    weights: Form | None = None
    """Format of the network's weights on rollout workers: `bf16`, `int8`, `fp8`, `nf4`, or `w8a8`,
    which multiplies in int8. Default: the trainer's."""
    weight_cap: Annotated[float, Field(gt=1)] = 1.1
    """Maximum importance weight of a row, with `rollout.weights`. A batch whose mean ratio differs
    from 1 by more fails the run."""


class Encoder(Table):
    workers: NonNegative = 0
    """Number of encoder workers that `digenrl up` starts. With any, rollout devices hold no text
    encoder; with 0, each encodes its own prompts."""
    threads: Positive = 1
    """CPU threads of each encoder worker."""
    ahead: Positive = 2
    """Number of batches beyond the current one whose prompts are encoded in advance."""
    device: Literal["cpu"] | None = None
    """`cpu`: encoders use no GPU. Default: each encoder takes one free GPU."""


class Tables(Table):
    """All tables of a recipe."""

    run: Run
    model: Model
    data: Data
    sampling: Sampling
    batch: Batch
    algorithm: Algorithm = Algorithm()
    trainer: Trainer
    exchange: Exchange = Exchange()
    rollout: Rollout = Rollout()
    encoder: Encoder = Encoder()
    reward: Reward
    schedule: Schedule = Schedule()
    evaluation: Evaluation = Evaluation()

    @property
    def keeps_old_policy(self) -> bool:
        """Whether devices that train also hold the weights that generate: an average, or those that
        the batch is trained from while they move."""
        method = ALGORITHMS[self.algorithm.name]
        moves = self.algorithm.nft_decay > 0 or self.trainer.updates > 1
        return method.has_old_policy and moves

    @property
    def keeps_batch_start(self) -> bool:
        """Whether devices that train also hold the weights at the start of a batch, around which
        the decoupled loss of its later updates is clipped."""
        is_decoupled = (
            self.algorithm.stale_loss == "decoupled" or self.largest_weight is not None
        ) and ALGORITHMS[self.algorithm.name].corrects_staleness
        return is_decoupled and self.trainer.updates > 1

    @property
    def reference(self) -> Literal["base", "adapter"]:
        """Reference of KL and DPO: the original model, or the model with the adapter at the start
        of the run."""
        return self.algorithm.reference or ("base" if self.model.adapter is None else "adapter")

    @property
    def keeps_reference(self) -> bool:
        """Whether devices that train hold a copy of the weights that the run began from: the model
        without its adapter needs none."""
        compares = self.algorithm.kl_beta > 0 or ALGORITHMS[self.algorithm.name].needs_base
        return compares and (self.reference == "adapter" or self.model.trained == "full")

    @property
    def trained_sets(self) -> TrainedSets:
        """Copies of trained weights that a training device holds in addition to its network."""
        old, full = self.keeps_old_policy, self.model.trained == "full"
        is_rounded = self.exchange.down != "exact"
        masters = is_rounded + (is_rounded and self.trainer.updates > 1)
        return TrainedSets(
            kept=old + (self.keeps_reference and not full) + self.keeps_batch_start + masters,
            on_host=int(self.keeps_reference and full),
            ahead=2 + old if self.schedule.staleness_limit else 0,
            averages=int(self.trainer.ema is not None),
        )

    @property
    def trained_samples(self) -> int:
        """Number of samples that are trained of each group; a pair counts as one."""
        if ALGORITHMS[self.algorithm.name].pairs:
            return 1
        return self.algorithm.best_of or self.batch.group_size

    @property
    def generating_parts(self) -> frozenset[ModelPart]:
        """Parts of the model that a device holds to generate: text is left to encoders."""
        parts: frozenset[ModelPart] = frozenset({"transformer", "decoder"})
        return parts if self.encoder.workers else parts | {"text"}

    @property
    def trainer_holding(self) -> WeightsHolding:
        """How a device that trains holds the network, and what evaluates."""
        return WeightsHolding(self.model.weights, self.trainer.memory)

    @property
    def holding(self) -> WeightsHolding:
        """How a rollout worker holds the network. A lent trainer has its own."""
        form = self.rollout.weights or self.model.weights
        same = form == "bf16" and self.model.dtype == "bfloat16"
        memory = self.rollout.memory or self.trainer.memory
        return WeightsHolding(None if same else form, memory)

    @property
    def largest_weight(self) -> float | None:
        """Largest weight of a row by the ratio of the trainer's network to the one that generated;
        None where both compute with the same weights."""
        same = self.holding.weights == self.model.weights
        return None if same else self.rollout.weight_cap

    @property
    def run_schedule(self) -> RunSchedule:
        """The schedule with what other tables imply: the same bytes need the same fragments."""
        table = self.schedule
        whole = self.trainer.deterministic and table.fragment_size == "auto"
        is_off = table.tag == "off" or table.mode not in ("disaggregated", "fluid")
        return RunSchedule.model_validate({
            **table.model_dump(),
            "fragment_size": self.batch.group_size if whole else table.fragment_size,
            "tsp_steps": "auto" if self.sampling.window == 1 else table.tsp_steps,
            "tag": 0 if is_off else table.tag,
            "max_staleness": table.staleness_limit,
            "deterministic": self.trainer.deterministic,
            **self.exchange.model_dump(),
        })  # fmt: skip

    @property
    def trains_zeros(self) -> bool:
        """Whether samples without advantage have a gradient: the KL's, or the pull to an old
        policy."""
        has_kl = self.algorithm.kl_beta > 0 and self.algorithm.zero_advantages == "kept"
        return has_kl or self.keeps_old_policy

    @property
    def advantages(self) -> Advantages:
        total = math.fsum(abs(scorer.weight) for scorer in self.reward.scorers) or 1.0
        weights = tuple((each.name, each.weight / total) for each in self.reward.scorers)
        normalised = self.algorithm.rewards == "normalised"
        return Advantages(
            self.algorithm.advantage_std, weights if normalised else (), self.reward.max_failed
        )
