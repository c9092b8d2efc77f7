"""Adapters as peft writes them (adapter_config.json, adapter_model.safetensors), for peft itself, transformers and vLLM."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from hetpipe.checkpoints.stores.tensor_files import save_tensors
from hetpipe.documents.sections.adapter import WEIGHTS_FILE, AdapterSection
from hetpipe.files.messages import InputError, one_line
from hetpipe.files.writing import make_folder
from hetpipe.hf.adapters.bare import bare_chain
from hetpipe.hf.adapters.patterns import modules_to_save, target_modules
from hetpipe.hf.chain import HFLayer
from hetpipe.layers.adapters.folder import PREFIX
from hetpipe.layers.adapters.low_rank import load_peft
from hetpipe.layers.adapters.names import ADAPTER, Trained, names_of, split_kind, trained_in, uncompiled_layers
from hetpipe.layers.adapters.targets import is_turned
from hetpipe.layers.transforms import lineage_of

if TYPE_CHECKING:
    from peft import PeftConfig


class Base(NamedTuple):
    """The model that adapters were trained beside, as far as it is known: without adapters and values; else names of its modules
    (`known`); what it is called, and what peft wraps it as. `otherwise`: what to do where peft would not load them."""

    model: nn.Module | None = None
    known: Collection[str] | None = None
    name: str | None = None
    revision: str | None = None
    task: str | None = None
    otherwise: str = ""


def write_adapters(layers: nn.Sequential, section: AdapterSection, read: Callable[[str], Tensor], folder: str | Path) -> Path:
    """Write the adapters of a chain into a new folder: for the model of the library that its layers are of, or for the chain as
    it was without them. `read` gives a tensor, by its name in the chain. InputError, and no folder, where peft would not load
    them."""
    return write_named(trained_in(layers), section, read, folder, _base_of(layers))


def write_named(trained: Trained, section: AdapterSection, read: Callable[[str], Tensor], folder: str | Path, base: Base) -> Path:
    """Write what trained, by the names that it has outside."""
    load_peft()
    tensors = {f"{PREFIX}{path}.{kind}": name for name, (path, kind) in trained.adapters.items()}
    tensors |= {f"{PREFIX}{outside}": name for name, outside in trained.whole.items()}
    config, target = _config(section, trained, base), make_folder(folder)
    save_tensors({key: read(name) for key, name in tensors.items()}, target / WEIGHTS_FILE)
    config.save_pretrained(str(target))
    if base.model is not None:
        _check_loads(tensors, base.model, target, base.otherwise)
    return target


def _base_of(layers: nn.Sequential) -> Base:
    every = uncompiled_layers(layers)
    first = next((lineage.written for _, layer in every if (lineage := lineage_of(layer)) is not None), None)
    if not isinstance(first, HFLayer):
        names = [name for label, layer in every for name in (names_of(label, layer) or {}).values()]
        if names:
            return Base(known={name[:at] for name in names for at, letter in enumerate(name) if letter == "."})
        return Base(bare_chain(layers), otherwise="load the checkpoint where they are used (hetpipe.load_weights)")
    model, folder = first.origin.model, first.origin.folder
    return Base(
        copy.deepcopy(model),
        name=str(folder.named) if folder is not None else None,
        revision=folder.revision if folder is not None else None,
        task=_task(type(model).__name__),
        otherwise="write the whole model, with --merge",
    )


def _check_loads(keys: Collection[str], model: nn.Module, folder: Path, otherwise: str) -> None:
    """InputError, and no folder, if peft finds something else in it: of mixtures of experts, say, it takes the names of dense
    layers for those of experts. Nothing is computed. The model, which has no values, is peft's afterwards."""
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = PeftModel.from_pretrained(model, str(folder), torch_device="cpu", low_cpu_mem_usage=True)
        there = [*loaded.state_dict()]
        found = {key for name in there if (key := _in_file(name)) is not None}
        found |= {*keys} & {*there}  # what it loads into the model itself
        told = f"it finds {len(found)} tensors, and {len(keys)} were trained" if found != {*keys} else ""
    except Exception as error:  # whatever peft says
        told = one_line(error)
    if told:
        shutil.rmtree(folder)
        raise InputError(f"peft would not load these adapters as they were trained ({told}): {otherwise}")


def _in_file(name: str) -> str | None:
    """What a tensor of a model with adapters is called in the file; None where it is none of theirs."""
    path, kind = split_kind(name)
    if kind:
        return f"{path}.{kind}"
    whole = f".modules_to_save.{ADAPTER}."
    return name.replace(whole, ".") if whole in name else None


def _config(section: AdapterSection, trained: Trained, base: Base) -> PeftConfig:
    from peft import LoraConfig

    adapted = {path for path, _ in trained.adapters.values()}
    whole = {outside.rpartition(".")[0] for outside in trained.whole.values()}
    modules = dict(base.model.named_modules(remove_duplicate=False)) if base.model is not None else {}
    known, short = (modules.keys(), True) if base.model is not None else (base.known, False)
    return LoraConfig(
        r=section.r,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # peft takes any number
        lora_dropout=section.dropout,
        use_rslora=section.rank_stabilized,
        use_dora=section.use_dora,
        fan_in_fan_out=any(is_turned(modules[path]) for path in adapted if path in modules),
        target_modules=target_modules(adapted, known, short=short),
        modules_to_save=modules_to_save(whole, known, adapted, short=short),
        inference_mode=True,
        task_type=base.task,
        base_model_name_or_path=base.name,
        revision=base.revision,
    )


def _task(name: str) -> str | None:
    """What peft wraps a model of this class as; None where it needs nothing of its own."""
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "CAUSAL_LM"
    if name.endswith("ForSequenceClassification"):
        return "SEQ_CLS"
    return "SEQ_2_SEQ_LM" if name.endswith("ForConditionalGeneration") else None
