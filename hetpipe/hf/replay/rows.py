"""Whether a model of transformers takes the rows of a job's data as samples of their own. transformers, half a second of import,
is there already where there is such a model, and not imported where there is none."""

from __future__ import annotations

from typing import Any

from torch import nn

from hetpipe.building.called import extras_of
from hetpipe.building.data import Ragged
from hetpipe.building.datasets import DataSplits
from hetpipe.building.fused import WithLabels
from hetpipe.hf.chain import SCORE
from hetpipe.layers.model import Model, Tensors, as_tuple
from hetpipe.layers.trials.apart import note_of_switch, refuse_looking_ahead, refuse_mixing, refuse_strange, refuse_switch
from hetpipe.processes.environment import own_rank
from hetpipe.processes.progress import warn


def refuse_unseen(model: Model, data: DataSplits) -> None:
    """InputError if a model of transformers would see samples beside one in its row, or padding behind it, or if it does not know
    the words that there are."""
    whole = _replayed(model.layers)
    if whole is None:
        return
    splits = [each.samples if isinstance(each, WithLabels) else each for each in (data.train, data.test) if each is not None]
    names = data.names or ("attention_mask",)
    for split in splits:
        refuse_strange(whole.config, split)
    if "position_ids" in names:
        for split in splits:
            _refuse_mixed(whole, split, model.inputs)
    elif isinstance(data.train, Ragged):
        _check_padded(whole, data.train, masked="attention_mask" in names)


def refuse_mixed_rows(layers: nn.Sequential, inputs: Tensors) -> None:
    """InputError if a model of transformers would see samples beside one in its row, for a sample batch in whose rows positions
    begin anew."""
    whole, named = _replayed(layers), dict(zip(("input_ids", *(extras_of(layers) or ())), as_tuple(inputs), strict=False))
    positions = named.get("position_ids")
    if whole is not None and positions is not None and positions.ndim == 2 and bool((positions.diff() != 1).any()):
        _refuse_mixed(whole, None, inputs)


def _replayed(layers: nn.Sequential) -> Any:
    """The model of transformers that the layers replay; None if they replay none."""
    return next((origin.model for layer in layers if (origin := getattr(layer, "origin", None)) is not None), None)


def _class_of(whole: Any) -> Any:
    """The class of its model of language, which gives logits for each token; a reward model's own gives one score."""
    from hetpipe.hf.replay.classes import causal_lm_of

    return causal_lm_of(whole.config)[0] if hasattr(whole, SCORE) else type(whole)


def _check_padded(whole: Any, data: Ragged, *, masked: bool) -> None:
    """InputError if a model of transformers would see padding that no mask hides; a note if its positions hang on how much there
    is."""
    told = note_of_switch(whole.config, int(data.lengths.min()), data.sizes[-1])
    if told is not None and own_rank() == 0:
        warn(told)
    if not masked:
        from hetpipe.hf.replay.tiny import tiny

        refuse_looking_ahead(kind := _class_of(whole), tiny(kind, whole.config))


def _refuse_mixed(whole: Any, split: Any, inputs: Tensors) -> None:
    """InputError if a model of transformers would see samples beside one in its row. Data that do not say how long their samples
    are may have any in rows of this length."""
    from hetpipe.hf.replay.tiny import limits_of, tiny

    reach = getattr(split, "reach", (1, as_tuple(inputs)[0].shape[-1]))
    refuse_switch(whole.config, reach)
    small = tiny(kind := _class_of(whole), whole.config)
    refuse_mixing(kind, small, limits_of(whole.config, small, reach))
