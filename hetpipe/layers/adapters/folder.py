"""A folder of peft (adapter_config.json, adapter_model.safetensors), here or on Hugging Face, as it is; and what of it is no
adapter that trains here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from hetpipe.documents.sections.adapter import CONFIG_FILE, WEIGHTS_FILE
from hetpipe.files.formats import read_mapping, validated
from hetpipe.files.hub import cached_folder
from hetpipe.files.messages import InputError, cut, listed, shown
from hetpipe.files.tensors import TensorFiles, names_in
from hetpipe.processes.environment import place

PREFIX = "base_model.model."  # of all names in the file
PICKLED = "adapter_model.bin"
# Of adapter_config.json: what is read in `given`, and what changes nothing of what is computed from tensors that are there
_KNOWN = {
    "peft_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "use_dora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "auto_mapping",
    "peft_version",
    "revision",
    "inference_mode",
    "task_type",
    "fan_in_fan_out",
    "megatron_core",
    "qalora_group_size",
    "eva_config",
    "corda_config",
    "loftq_config",
    "lora_ga_config",
    "runtime_config",
}
_UNIFORM = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}
_PLAIN_INIT = (True, False, None, "gaussian", "eva", "orthogonal")
_WHY = {
    "bias": "only matrices train beside adapters, and what train_also names: bias must be none",
    "rank_pattern": "all adapters have one rank here",
    "alpha_pattern": "all adapters have one alpha here",
    "lora_bias": "adapters have no bias here",
    "target_parameters": "adapters are beside modules here, and not beside parameters",
    "trainable_token_indices": "an embedding trains as a whole here (train_also: [embed]), or not",
    "alora_invocation_tokens": "an adapter is in use for all tokens here",
    "layer_replication": "layers stand in a chain once, as the model has them",
}


class _Config(BaseModel):
    """The types of what is read of adapter_config.json, beside what `AdapterSection` has."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    base_model_name_or_path: str | None = None
    ensure_weight_tying: bool | None = None


class AdapterFolder:
    """`config`: what adapter_config.json holds; `shapes`: of each tensor by its name in the file; `named`: what was asked for.
    InputError where it is no folder of peft, or holds what is no LoRA as it trains here."""

    def __init__(self, named: str) -> None:
        self.named = named
        self.path, _ = cached_folder(named, (CONFIG_FILE, WEIGHTS_FILE), quiet=place().local_rank > 0)
        self._check_there()
        found = read_mapping(self.path / CONFIG_FILE)
        if not isinstance(found, Mapping):
            raise InputError(f"{self.path / CONFIG_FILE}: expected a mapping, found a {type(found).__name__}")
        self.config = validated(_Config, dict(found), str(self.path / CONFIG_FILE), "configuration of adapters").model_dump()
        if faults := faults_of(self.config):
            raise InputError(f"adapter.weights: the adapters in {self} cannot go on here:\n{listed(faults)}")
        self._tensors = TensorFiles(names_in(self.path / WEIGHTS_FILE))
        self.shapes = self._tensors.shapes()

    def __str__(self) -> str:
        return cut(self.named, 200)

    def _check_there(self) -> None:
        if not os.path.isfile(self.path / CONFIG_FILE):
            more = ", and no name of a model on Hugging Face (owner/name)"
            if os.path.isdir(self.path):
                inside = sorted(file.parent.name for file in self.path.glob(f"*/{CONFIG_FILE}"))[:8]
                more = f": it holds {' and '.join(map(shown, inside))}, of which one can be named" if inside else ""
            raise InputError(f"adapter.weights: {self} is no folder of peft: it has no {CONFIG_FILE}{more}")
        if not os.path.isfile(self.path / WEIGHTS_FILE):
            pickled = os.path.isfile(self.path / PICKLED)
            told = f"has {PICKLED}, which runs whatever code is in it when it is read, and no" if pickled else "has no"
            raise InputError(
                f"adapter.weights: {self} {told} {WEIGHTS_FILE}: load it with peft, and save it again: "
                f"PeftModel.from_pretrained(model, {str(self)!r}).save_pretrained('new')"
            )

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own. InputError where numbers are not finite, or an adapter's have less than 16 bits."""
        found = self._tensors.read(name)
        if found.element_size() < 2 or (".lora_" in name and not found.is_floating_point()):
            told = f"is of {found.dtype}, and an adapter must be of floating-point numbers of 16 bits or more"
            raise InputError(f"adapter.weights: {shown(name)} in {self} {told}")
        if not bool(torch.isfinite(found).all()):
            raise InputError(
                f"adapter.weights: {shown(name)} in {self} holds infinite numbers, or such as are no numbers: what "
                "trained it had failed; take an earlier one"
            )
        return found

    def digest(self) -> str:
        """Return a digest of the bytes of both files."""
        found = hashlib.sha256()
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            with open(self.path / name, "rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
        return found.hexdigest()[:16]


def faults_of(config: Mapping[str, Any]) -> list[str]:
    """What a configuration of peft asks for that does not train here, each with its value."""
    if config.get("peft_type") != "LORA":
        return [f"peft_type is {shown(config.get('peft_type'))}: only LORA trains here"]
    asked = {key: value for key, value in config.items() if key not in _KNOWN and not _says_nothing(config, key, value)}
    return [f"{key} is {shown(value)}: {_why(key, value)}" for key, value in asked.items()]


def _says_nothing(config: Mapping[str, Any], key: str, value: Any) -> bool:
    if key == "init_lora_weights":
        return value in _PLAIN_INIT
    if key in _UNIFORM and isinstance(value, Mapping):
        return all(each == config.get(_UNIFORM[key]) for each in value.values())
    return not value or (key == "bias" and value == "none")


def _why(key: str, value: Any) -> str:
    if key != "init_lora_weights":
        return _WHY.get(key, f"what it does is not known here; where it does nothing, take it out of {CONFIG_FILE}")
    if value == "mica":
        return "of such adapters one of the two matrices does not train"
    if value == "loftq":
        return "such adapters are beside another base, whose matrices were changed with them"
    return (
        "such adapters are beside another base, from whose matrices they were taken: let peft make plain ones of them "
        "(save_pretrained with path_initial_model_for_weight_conversion)"
    )
