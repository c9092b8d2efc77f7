"""The classes of a model and of its configuration: transformers' own, or those of code that lies in its folder."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock

from hetpipe.files.messages import InputError, cut, nearest, one_line, shown
from hetpipe.hf.chain import SCORE
from hetpipe.hf.folder import WeightFolder

import transformers  # isort: skip

CONFIG, MODEL = "AutoConfig", "AutoModelForCausalLM"  # keys of a config.json's auto_map


class Classes(NamedTuple):
    """Of a causal language model. `code`: where a folder says that they lie, where they are its own."""

    kind: str
    config: Any
    model: Any
    code: dict[str, str] | None = None


def classes_of(folder: WeightFolder | None, kind: str | None, trust_remote_code: bool | None) -> Classes:
    """Those of a folder, or of transformers' type. Code of the folder runs only where it is trusted. InputError where there are
    none, or where a folder has code and nobody says whether it is trusted."""
    if not (trust_remote_code is None or isinstance(trust_remote_code, bool)):
        raise InputError(f"causal_lm: trust_remote_code is {shown(trust_remote_code)}: write true or false")
    kind = str(folder.config.get("model_type") if folder is not None else kind)
    code = folder.config.get("auto_map") if folder is not None else None
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if folder is not None and code is not None and trust_remote_code is not False:
        return _own(folder, kind, code, trust_remote_code, kind in known)
    if kind not in known:
        more = "" if code is None else "; its folder has code for it, which runs only under trust_remote_code: true"
        raise InputError(
            f"causal_lm: transformers {transformers.__version__} has no causal language model of type {shown(kind)}"
            f"{nearest(kind, list(known))}{more}"
        )
    config = transformers.CONFIG_MAPPING[kind]
    return Classes(kind, config, transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config])


def text_part(model_class: Any, config: Any) -> Any:
    """Of a configuration for text and images that of the text, where the model is of that alone, as transformers' own
    AutoModelForCausalLM has it; else the configuration itself."""
    parts = [getattr(config, name, None) for name in type(config).sub_configs]
    return next((part for part in parts if type(part) is model_class.config_class), config)


def causal_lm_of(config: Any) -> tuple[Any, Any]:
    """The class of transformers' causal language model of a configuration, and that of which it is made."""
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return model_class, text_part(model_class, config)


def scoring(model_class: Any, config: Any) -> tuple[Any, str]:
    """The class of transformers that gives each sample one number by a linear layer `score`, in the place of the layer of a
    causal language model that gives its logits; and the path of that. InputError where there is none, or where it has other
    parameters beside these."""
    known: Any = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    kind = shown(config.model_type)
    if known is None:
        raise InputError(f"causal_lm: transformers {transformers.__version__} has no reward model of type {kind}")
    with torch.device("meta"):
        scores, speaks = known(copy.deepcopy(config)), model_class(copy.deepcopy(config))
    head = next(path for path, module in speaks.named_modules() if module is speaks.get_output_embeddings())
    own, theirs = ({name for name, _ in each.named_parameters()} for each in (scores, speaks))
    strange = {f"{SCORE}.weight"} - own or (own - {f"{SCORE}.weight"}) ^ {n for n in theirs if not n.startswith(f"{head}.")}
    if strange:
        raise InputError(
            f"causal_lm: {known.__name__} is not {model_class.__name__} with a layer {SCORE!r} in the place of {head!r} "
            f"({min(strange)} differs), so no reward model of type {kind} is cut"
        )
    return known, head


def _own(folder: WeightFolder, kind: str, code: Any, trusted: bool | None, known: bool) -> Classes:
    file = folder.path / "config.json"
    if not isinstance(code, dict) or not all(isinstance(where, str) for where in (code.get(MODEL), code.get(CONFIG, ""))):
        raise InputError(f"{file}: auto_map is {cut(shown(code), 200)}, which names no class for {MODEL}")
    if not trusted:
        instead = f", or false, to use transformers' own model of type {shown(kind)}" if known else ""
        raise InputError(
            f"causal_lm: {file} names code of its own (auto_map: {cut(code[MODEL], 200)}), which runs with your rights: read it, "
            f"and write trust_remote_code: true in the model's args{instead}"
        )
    config: Any = None
    if kind in transformers.CONFIG_MAPPING:  # whose own get knows none of its types
        config = transformers.CONFIG_MAPPING[kind]
    if CONFIG in code:
        config = _loaded(folder, code[CONFIG], transformers.PreTrainedConfig)
    elif config is None:
        raise InputError(f"{file}: auto_map names no class for {CONFIG}, and transformers knows no type {shown(kind)}")
    return Classes(kind, config, _loaded(folder, code[MODEL], transformers.PreTrainedModel), dict(code))


def _loaded(folder: WeightFolder, where: str, kind: type) -> Any:
    """The class of this name in a file of the folder. Ranks of one host copy these files one after the other."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.utils.hub import HF_MODULES_CACHE

    if "--" in where:
        raise InputError(
            f"{folder.path / 'config.json'}: {shown(where)} (auto_map) lies in another repository; only code in the "
            "folder itself is run"
        )
    try:
        Path(HF_MODULES_CACHE).mkdir(parents=True, exist_ok=True)
        with FileLock(Path(HF_MODULES_CACHE, ".hetpipe.lock")):
            importlib.invalidate_caches()
            found = get_class_from_dynamic_module(where, folder.path)
        if not issubclass(found, kind):
            raise TypeError(f"it is no {kind.__name__}")
    except Exception as error:  # whatever that code says
        raise InputError(
            f"{folder.path}: {shown(where)} (auto_map) cannot be loaded: {type(error).__name__}: {one_line(error)}"
        ) from error
    return found
