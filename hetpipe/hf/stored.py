"""Which tensors of a folder a model's are made of, and back, by transformers' own conversions: files hold older names, experts
one by one, or several projections in one tensor."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hetpipe.files.messages import InputError, one_line, shown
from hetpipe.hf.folder import WeightFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class StoredTensors:
    """The tensors of a model (on the meta device) by its own names, read from a folder."""

    def __init__(self, model: PreTrainedModel, folder: WeightFolder) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        self.model, self.folder = model, folder
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self.shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._numbers = {name for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
        self._converter: dict[str, Any] = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        self._source: dict[str, str] = {}  # own name → name in the folder
        self._group: dict[str, str] = {}  # own name → the first of those that are made together
        self._made_of: dict[str, list[tuple[str, str]]] = {}  # that → names in the folder, each with the pattern
        state: Any = model.state_dict()
        for key in sorted(folder, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
            if name not in state and key in state:
                name, pattern = key, None
            if pattern is None:
                self._source.setdefault(name, key)
                continue
            targets = self._converter[pattern].target_patterns
            self._made_of.setdefault(name, []).append((key, pattern))
            for target in targets:
                self._group[name.replace(targets[0], target)] = name

    def __contains__(self, name: str) -> bool:
        return name in self._source or name in self._group

    def unused(self) -> list[str]:
        """Names in the folder of what the model has no tensor for, but for what transformers, too, leaves out without a word."""
        own = {*self.shapes, *(name for name, _ in self.model.named_buffers())}
        ignored = [re.compile(pattern) for pattern in self.model._keys_to_ignore_on_load_unexpected or ()]
        found = {key: name for name, key in self._source.items() if name not in own}
        found |= {key: name for name, keys in self._made_of.items() if not own & set(self._made_with(name)) for key, _ in keys}
        return sorted(key for key, name in found.items() if not any(p.search(text) for p in ignored for text in (key, name)))

    def _made_with(self, first: str) -> list[str]:
        return [name for name, group in self._group.items() if group == first]

    def read(self, name: str) -> Tensor:
        """One tensor. InputError where the folder's has another shape, is quantised, or cannot be converted."""
        found = self.folder.read(self._source[name]) if name in self._source else self._converted(name)
        wanted = self.shapes.get(name, tuple(found.shape))
        if tuple(found.shape) != wanted:
            raise InputError(
                f"{self.folder.path}: {shown(name)} has shape {tuple(found.shape)}, and the model's configuration asks "
                f"for {wanted}"
            )
        if name in self._numbers and found.dtype not in NUMBERS:
            raise InputError(
                f"{self.folder.path}: {shown(name)} is {found.dtype}, and the model has floating-point numbers of 16 bits or "
                "more there: where it is quantised, dequantize it with transformers, and save it again"
            )
        return found

    def type_of(self, name: str) -> torch.dtype:
        """In which number type the folder holds it, or the first of those that it is made of."""
        key = self._source[name] if name in self._source else self._made_of[self._group[name]][0][0]
        return self.folder.type_of(key)

    def _converted(self, name: str) -> Tensor:
        first = self._group[name]
        keys = self._made_of[first]
        converter = copy.deepcopy(self._converter[keys[0][1]])
        try:
            for key, pattern in keys:
                converter.add_tensor(first, key, pattern, self.folder.read(key))
            made = converter.convert(first, model=self.model, config=self.model.config)
            found = made[name]
        except InputError:
            raise
        except Exception as error:  # whatever transformers says of tensors that do not fit together
            raise InputError(
                f"{self.folder.path}: {shown(name)} cannot be made of {shown(keys[0][0])} and {len(keys) - 1} more: "
                f"{one_line(error)}"
            ) from error
        whole: Tensor = found[0] if isinstance(found, list) else found
        return whole


def as_stored(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole layers' tensors by the model's names, as `save_pretrained` writes them: by the names of files, each in memory of its
    own. InputError where transformers cannot turn its conversion of this model around."""
    from transformers.core_model_loading import revert_weight_conversion

    kept = {name: tensor for name, tensor in tensors.items() if name not in (model._keys_to_ignore_on_save or ())}
    try:
        found = revert_weight_conversion(model, kept)
    except Exception as error:  # whatever transformers says
        raise InputError(
            f"transformers cannot write the weights of a {type(model).__name__} as save_pretrained does: {one_line(error)}"
        ) from error
    return {name: _apart(tensor) for name, tensor in found.items()}


def _apart(tensor: Tensor) -> Tensor:
    """In memory of its own, all of which it fills."""
    alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
