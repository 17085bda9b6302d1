"""Reads the header of a LoRA file, without torch: names and shapes of its tensors, and alphas."""

import contextlib
import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from shared.models.lora_names import HIGH, LOW
from shared.models.memory import read_header

METADATA_KEY = "lora_adapter_metadata"
"""Key under which diffusers keeps rank and alpha in a file; without it, alpha is the rank."""
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"

Role = Literal["down", "up", "alpha"]

ALPHA = ".alpha"
ENDINGS: Mapping[str, Role] = {
    ".lora_A.weight": "down", ".lora_B.weight": "up",
    ".lora_A.default.weight": "down", ".lora_B.default.weight": "up",
    ".lora_down.weight": "down", ".lora_up.weight": "up",
    ".lora.down.weight": "down", ".lora.up.weight": "up",
    ALPHA: "alpha",
}  # fmt: skip
TEXT = re.compile(
    r"(base_model\.model\.|pipe\.)?(text_encoder|text_model|lora_te|te\d?[._]|clip|t5)"
)
FORMATS = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i"}
FLOATS = ("F64", "F32", "F16", "BF16")
FLOAT8_TYPES = ("F8_E4M3", "F8_E5M2")
NEUTRAL_KEYS = frozenset({
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "revision",
    "target_modules", "task_type",
})  # fmt: skip
"""Keys of peft's configuration that change nothing of how a plain LoRA is computed, or are read."""
PLAIN_VALUES: Mapping[str, Sequence[object]] = {
    "peft_type": ("LORA",), "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
}  # fmt: skip
"""Values of the keys that may mark a LoRA as not plain, besides null values."""


class LoraHeader:
    """Reads the header of a file, and a few of its numbers."""

    def __init__(self, path: Path) -> None:
        """Raises UserError if it is no safetensors file, and ValueError if it is truncated, or
        holds what is neither a text encoder's nor a matrix or alpha of a layer."""
        header, self._start = read_header(path)
        self.path = path
        self.metadata: Mapping[str, Any] = header.pop("__metadata__", {})
        self.text = sorted(filter(TEXT.match, header))
        """Tensors of text encoders."""
        self.tensors = {name: header[name] for name in header if not TEXT.match(name)}
        self.stems: dict[str, dict[Role, str]] = {}
        """Names of the tensors of each layer by their roles."""
        for name in sorted(self.tensors):
            stem, role = self._role(name)
            self.stems.setdefault(stem, {})[role] = name
        if not self.stems:
            raise ValueError("holds no tensors of a network")
        last = max(entry["data_offsets"][1] for entry in header.values())
        if path.stat().st_size < self._start + last:
            raise ValueError("is broken off; copy or fetch it again")

    def _role(self, name: str) -> tuple[str, Role]:
        """Returns the layer of a tensor, and which of the layer's tensors it is."""
        dtype = self.tensors[name]["dtype"]
        if dtype not in (*FLOATS, *(FORMATS if name.endswith(ALPHA) else FLOAT8_TYPES)):
            raise ValueError(f"holds {name} as {dtype}; save it as bfloat16")
        for ending, role in ENDINGS.items():
            if name.endswith(ending):
                return name.removesuffix(ending), role
        raise ValueError(
            f"holds {name}, which is no part of a plain LoRA (A, B and alpha of a layer): "
            "DoRA, LoHa, LoKr, biases and whole weights are not read; train a plain LoRA"
        )

    def shapes(self, stem: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of a layer's A and B."""
        names = self.stems[stem]
        if not {"down", "up"} <= names.keys():
            raise ValueError(f"has only one of the two matrices of {stem}")
        down, up = (tuple(self.tensors[names[role]]["shape"]) for role in ("down", "up"))
        if 0 in down:
            raise ValueError(f"has matrices without numbers for {stem}; save it again")
        if len(down) != 2 or up[1:] != down[:1]:
            raise ValueError(f"has {list(up)} x {list(down)} for {stem}, which are no B and A")
        return down, up

    def data(self, name: str) -> bytes:
        first, last = self.tensors[name]["data_offsets"]
        with self.path.open("rb") as stream:
            stream.seek(self._start + first)
            return stream.read(last - first)

    def alpha(self, stem: str) -> float:
        """Returns a layer's alpha; raises ValueError if it is not above 0."""
        config, names = self._config, self.stems[stem]
        patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
        try:
            own = (a for key, a in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", stem))
            alpha = float(next(own, config.get("lora_alpha", self.shapes(stem)[0][0])))
        except re.error as error:
            raise ValueError(f"has an invalid alpha_pattern: {error}") from error
        if "alpha" in names:
            alpha = self._number(names["alpha"])
        if not 0 < alpha < math.inf:
            raise ValueError(f"has the alpha {alpha:g} for {stem}; it has to be above 0")
        return alpha

    def _number(self, name: str) -> float:
        """Raises ValueError if the tensor is not one number."""
        data, dtype = self.data(name), self.tensors[name]["dtype"]
        if dtype == "BF16":
            data, dtype = b"\0\0" + data, "F32"
        try:
            return float(struct.unpack(f"<{FORMATS[dtype]}", data)[0])
        except struct.error as error:
            raise ValueError(f"has a {name} that is not one number") from error

    @cached_property
    def _config(self) -> dict[str, Any]:
        """Peft's configuration; raises ValueError unless it describes a plain LoRA."""
        config = self._stored_config()
        for key, value in config.items():
            plain = PLAIN_VALUES.get(key, ())
            if key not in NEUTRAL_KEYS and value not in (None, False, "none", *plain) and value:
                raise ValueError(
                    f"is a LoRA with {key} = {json.dumps(value)}, which is not trained; train a "
                    "plain one, or merge it into model.folder"
                )
        return config

    def _stored_config(self) -> dict[str, Any]:
        """Return the configuration in the file's metadata, or in the file next to it."""
        what, text = METADATA_KEY, self.metadata.get(METADATA_KEY)
        sibling = self.path.parent / PEFT_CONFIG
        if text is None and sibling.is_file():
            what, text = PEFT_CONFIG, sibling.read_text()
        if text is None and any(name.startswith("base_model.model.") for name in self.tensors):
            raise ValueError(f"is in peft's layout, and needs its {PEFT_CONFIG} in the same folder")
        config: Any = None
        with contextlib.suppress(ValueError):
            config = json.loads("{}" if text is None else text)
        if not isinstance(config, dict):
            raise ValueError(f"has no JSON object as its {what}; copy or fetch it again")
        return {
            name.removeprefix(f"{LOW}.").removeprefix(f"{HIGH}."): value
            for name, value in config.items()
            if not TEXT.match(name)
        }
