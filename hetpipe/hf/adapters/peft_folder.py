"""Adapters as peft writes them (adapter_config.json, adapter_model.safetensors), for peft itself, transformers and vLLM."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file
from torch import Tensor, nn

from hetpipe.files.messages import InputError, one_line
from hetpipe.files.writing import make_folder
from hetpipe.hf.adapters.names import Adapted, adapted_of, names_of_one
from hetpipe.hf.chain import Origin
from hetpipe.layers.adapters.low_rank import ADAPTER, load_peft
from hetpipe.spec.sections.adapter import AdapterSection

if TYPE_CHECKING:
    from peft import PeftConfig

FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of all names there


def write_adapters(
    layers: nn.Sequential, section: AdapterSection, origin: Origin, read: Callable[[str], Tensor], folder: str | Path
) -> Path:
    """Write the adapters of a chain of layers of transformers into a new folder; `read` gives a tensor, by its name in it."""
    load_peft()
    found = adapted_of(layers)
    tensors = {f"{PREFIX}{path}.{kind}": name for each in found.values() for name, (path, kind) in each.adapters.items()}
    alike = names_of_one(origin.model)
    tensors |= {f"{PREFIX}{same}": name for each in found.values() for name, own in each.own.items() for same in alike[own]}
    config = _config(section, origin, found)
    target = make_folder(folder)
    save_file({key: read(name).contiguous() for key, name in sorted(tensors.items())}, target / FILE, metadata={"format": "pt"})
    config.save_pretrained(str(target))
    _check_loads({key for key in tensors if ".lora_" in key}, origin, target)
    return target


def _check_loads(keys: Collection[str], origin: Origin, folder: Path) -> None:
    """InputError, and no folder, if peft finds other adapters in it: of mixtures of experts, say, it takes the names of dense
    layers for those of experts. Nothing is computed: the model has no values."""
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            empty = copy.deepcopy(origin.model)
            loaded = PeftModel.from_pretrained(empty, str(folder), torch_device="cpu", low_cpu_mem_usage=True)
        found = {name.replace(f".{ADAPTER}", "") for name, _ in loaded.named_parameters() if ".lora_" in name}
        told = f"it finds {len(found)} tensors of adapters, and {len(keys)} were trained" if found != {*keys} else ""
    except Exception as error:  # whatever peft says
        told = one_line(error)
    if told:
        shutil.rmtree(folder)
        raise InputError(f"peft would not load these adapters as they were trained ({told}): write the whole model, with --merge")


def _config(section: AdapterSection, origin: Origin, found: Mapping[str, Adapted]) -> PeftConfig:
    from peft import LoraConfig

    paths = {path for each in found.values() for path, _ in each.adapters.values()}
    whole = {own.rpartition(".")[0] for each in found.values() for own in each.own.values()}
    model = origin.model
    turned = any(type(model.get_submodule(path)).__name__ == "Conv1D" for path in paths)
    folder = origin.folder
    return LoraConfig(
        r=section.r, lora_alpha=section.alpha, lora_dropout=section.dropout,  # type: ignore[arg-type]  # peft takes any number
        use_rslora=section.rank_stabilized, use_dora=section.use_dora, fan_in_fan_out=turned,
        target_modules=_short(paths, model), modules_to_save=_short(_with_ties(whole, model), model) or None,
        inference_mode=True, task_type=_task(type(model).__name__),
        base_model_name_or_path=str(folder.named) if folder is not None else None,
        revision=folder.revision if folder is not None else None,
    )  # fmt: skip


def _task(name: str) -> str | None:
    """What peft wraps a model of this class as; None where it needs nothing of its own."""
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "CAUSAL_LM"
    return "SEQ_2_SEQ_LM" if name.endswith("ForConditionalGeneration") else None


def _with_ties(whole: Collection[str], model: nn.Module) -> set[str]:
    """Modules that are saved as a whole: with those that share a parameter of them."""
    shared = {id(p) for path in whole for p in model.get_submodule(path).parameters()}
    return {path for path, module in model.named_modules() if any(id(p) in shared for p in module.parameters(recurse=False))}


def _short(paths: Collection[str], model: nn.Module) -> list[str]:
    """These modules as peft names them: by the ends of their paths (q_proj) where no other module has such an end, or in full."""
    ends = {path.rpartition(".")[2] for path in paths}
    others = {path for path, _ in model.named_modules() if path.rpartition(".")[2] in ends} - {*paths}
    return sorted(paths if others else ends)

