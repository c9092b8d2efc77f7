"""The section `adapter` of a job: low-rank matrices that train beside a model that stays as it is (LoRA; Hu et al. 2021), whose
own matrices may be held in fewer bits (QLoRA; Dettmers et al. 2023)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from hetpipe.documents.guesses import KeysOf
from hetpipe.files.formats import Flag, Name, Number, Positive, Strict, read_yaml
from hetpipe.files.messages import InputError, nearest, shown

FewBits = Literal["nf4", "fp8", "int8"]
Base = Literal["as-is", "bf16", "fp16", FewBits]
TrainedToo = Literal["embed", "head", "norms"]
ALL_LINEAR: Literal["all-linear"] = "all-linear"
IN_LORA = ("r", "alpha", "dropout", "targets", "rank_stabilized", "use_dora")  # keys that `--lora` takes
NO_LORA = "none"  # of --lora: all parameters train
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"  # of a folder of peft


class AdapterSection(Strict):
    """W·x becomes W·x + s·B·A·x; A [r, in] and B [out, r] train. s is alpha / r, or alpha / √r if `rank_stabilized`
    (Kalajdzievski 2023); `use_dora` also trains the lengths of the rows of W (Liu et al. 2024); `dropout` is of A's input.

    `targets`: which linear layers get A and B: all but the last layer's, or those whose names are, or end with, one
    of these. `train_also`: what of the model trains beside them. `base`: how its own matrices are held: as they are, in bf16 or
    fp16 (all that do not train), or those of linear layers in 4 bits (nf4) or 8 (fp8, int8).

    `weights`: a folder of peft, or its name on Hugging Face, whose adapters go on. It then says all keys but `base`: one that
    stands beside it must say the same, and `dropout` may say another."""

    guesses = KeysOf("adapter")
    kind: Literal["lora"] = "lora"
    weights: Name | None = None
    r: Positive = 16
    alpha: Annotated[Number, Field(gt=0)] = 32
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    targets: Literal["all-linear"] | Annotated[tuple[Name, ...], Field(min_length=1)] = ALL_LINEAR
    rank_stabilized: Flag = False
    use_dora: Flag = False
    train_also: tuple[TrainedToo, ...] = ()
    base: Base = "as-is"

    @model_validator(mode="before")
    @classmethod
    def _list_of_targets(cls, data: object) -> object:
        targets = data.get("targets") if isinstance(data, dict) else None
        if isinstance(targets, str) and targets != ALL_LINEAR:
            raise ValueError(
                f"targets is {shown(targets)}{nearest(targets, [ALL_LINEAR])}. Write all-linear, or a list, as in "
                "[q_proj, v_proj]"
            )
        return data

    @model_validator(mode="after")
    def _once_each(self) -> Self:
        for key in ("targets", "train_also"):
            names = getattr(self, key)
            double = next((name for name in names if names.count(name) > 1), None) if names != ALL_LINEAR else None
            if double is not None:
                raise ValueError(f"{key} has {shown(double)} twice")
        return self

    @property
    def said(self) -> dict[str, Any]:
        """The keys that stand beside `weights` and are of what it holds, each with its value."""
        return {key: getattr(self, key) for key in sorted(self.model_fields_set - {"kind", "weights", "base"})}

    @property
    def quantised(self) -> FewBits | None:
        """In which few bits the matrices of linear layers are held, if they are."""
        return self.base if self.base in get_args(FewBits) else None  # type: ignore[return-value]


def parse_lora(text: str) -> dict[str, Any]:
    """The keys of this section that a command's `--lora` says; alpha is 2 r unless it is said. InputError naming what is wrong.

    >>> parse_lora("r=8,dropout=0.05,targets=q_proj+v_proj")
    {'r': 8, 'alpha': 16, 'dropout': 0.05, 'targets': ['q_proj', 'v_proj']}
    """
    said, found = f"--lora {shown(text)}", dict[str, Any]()
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key in set(AdapterSection.model_fields) - set(IN_LORA):
            option = {"base": "--base", "weights": "--adapter"}.get(key, f"--set adapter.{key} of hetpipe finetune")
            raise InputError(f"{said}: {key} is not given here. Use {option}")
        if "targets" in found and not equals:
            raise InputError(f"{said}: join the names of targets by '+', as in targets=q_proj+v_proj")
        if not part.strip():
            raise InputError(f"{said}: there is nothing between two commas, or after the last")
        if key == NO_LORA:
            raise InputError(f"{said}: {NO_LORA} means that all parameters train, so write it alone")
        if key not in IN_LORA:
            raise InputError(f"{said}: unknown key {shown(key)}{nearest(key, [*IN_LORA, NO_LORA])}")
        if not equals or not value:
            raise InputError(f"{said}: {key} has no value; write r=16, or r=16,alpha=32,targets=q_proj+v_proj")
        if key in found:
            raise InputError(f"{said}: {key} is given twice")
        found[key] = _names(said, value) if key == "targets" else read_yaml(value, f"the value of {key} in {said}")
    r = found.setdefault("r", AdapterSection().r)
    positive = isinstance(r, int | float) and r > 0  # else the section says what is wrong with r
    return {"r": r, "alpha": 2 * r if positive else AdapterSection().alpha, **found}


def _names(said: str, value: str) -> str | list[str]:
    names = list(dict.fromkeys(name.strip() for name in value.split("+")))
    if not all(names) or "[" in value or (ALL_LINEAR in names and len(names) > 1):
        raise InputError(f"{said}: targets are names joined by '+', or {ALL_LINEAR}")
    return ALL_LINEAR if names == [ALL_LINEAR] else names
