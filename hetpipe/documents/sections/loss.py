"""The section `loss` of a job: what is minimised, and over what it is the mean."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hetpipe.documents.guesses import KeysOf
from hetpipe.files.formats import Flag, Name, Number, Strict
from hetpipe.files.limits import LARGEST_INTEGER

REWARD = "reward"  # the loss of a reward model
PREFERENCES = ("dpo", "simpo", "orpo", REWARD)  # losses over a better and a worse answer


class LossSection(Strict):
    """A loss of the registry, or a function (output, targets) → mean; `weight` says over what it is the mean: the samples, or the
    targets that are not `ignore_index` (tokens). A weighted mean has a `weight_fn` instead: a function, as
    `package.module:function`, of targets → what the loss of these divides by. `class_weights`: of cross_entropy, one number a
    class; it is then the mean weighted by them. `fused`: whether the model's head computes the cross-entropy of each token, so
    that the logits of a large vocabulary are never there at once; "auto": where the model can. dpo, simpo and orpo, of data
    with preferences: `beta` is how much a lead counts, `gamma` (simpo, and reward, which trains a reward model) by how much the
    better answer has to lead."""

    guesses = KeysOf("loss")
    name: Name | None = None
    target: Name | None = None
    weight: Literal["samples", "tokens"] = "samples"
    weight_fn: Name | None = None
    ignore_index: Annotated[int, Field(strict=True, ge=-LARGEST_INTEGER, le=LARGEST_INTEGER)] = -100
    class_weights: tuple[Annotated[Number, Field(ge=0)], ...] | None = None
    fused: Flag | Literal["auto"] = False
    beta: Annotated[Number, Field(gt=0)] | None = None
    gamma: Annotated[Number, Field(ge=0)] | None = None

    @property
    def prefers(self) -> bool:
        """Whether it is over a better and a worse answer."""
        return self.name in PREFERENCES

    @model_validator(mode="after")
    def _of_preferences(self) -> Self:
        for key, names in (("beta", PREFERENCES[:-1]), ("gamma", ("simpo", REWARD))):
            if getattr(self, key) is not None and self.name not in names:
                raise ValueError(f"{key!r} is of the loss {' or '.join(names)}: leave it out")
        return self

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.name is not None and self.target is not None:
            raise ValueError("give either 'name' or 'target' (package.module:function), and not both")
        return self

    @model_validator(mode="after")
    def _head_computes(self) -> Self:
        if self.fused and (self.target is not None or self.name not in (None, "cross_entropy")):
            raise ValueError(
                "'fused' is for name: cross_entropy only, because another loss needs the output of the last layer. Leave "
                "'fused' out"
            )
        own = next((key for key in ("weight_fn", "class_weights") if getattr(self, key) is not None), None)
        if self.fused and own is not None:
            raise ValueError(f"'fused' gives all samples, or all tokens, the same weight. Leave {own!r} out, or 'fused'")
        return self

    @model_validator(mode="after")
    def _one_weight(self) -> Self:
        own = [key for key in ("weight_fn", "class_weights") if getattr(self, key) is not None]
        if own and len(given := [key for key in ("weight", *own) if key in self.model_fields_set]) > 1:
            raise ValueError(f"give only one of {' and '.join(map(repr, given))}, because each decides what the mean is over")
        if self.class_weights is None:
            return self
        if self.target is not None or self.name not in (None, "cross_entropy"):
            raise ValueError("'class_weights' are for name: cross_entropy only. For another loss give a 'weight_fn'")
        if not any(weight > 0 for weight in self.class_weights):
            raise ValueError("'class_weights' has no number above 0")
        return self
