"""How a type of transformer is called: what it is told of time, what it predicts, and which of its arguments have samples."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hetpipe.files.formats import Flag, Name, Number, Strict, read_mapping, validated
from hetpipe.files.messages import InputError

TABLE = Path(__file__).with_name("kinds.yaml")
Prediction = Literal["flow", "epsilon", "v_prediction"]
Positive = Annotated[Number, Field(gt=0)]


class Kind(Strict):
    """One row of kinds.yaml.

    Attributes:
        time: what the model is told where a sample is noise alone; where it has no noise it is told 0.
        time_key: the key of its configuration by which its times are multiplied beside.
        inverted: it is told `time` where there is no noise, and 0 where there is nothing else.
        prediction: what it predicts, if the scheduler beside it does not say: the way from latents to noise (flow), the noise
            (epsilon), or v (Salimans and Ho 2022, section 4).
        negated: of what it predicts it gives the negative.
        guidance: by what the strength of guidance is multiplied that it is told, if it is.
        latents_name, time_name: its arguments.
        alone: arguments without samples.
        listed: arguments that are lists with a tensor for each sample.
    """

    time: Positive = 1000.0
    time_key: Name | None = None
    inverted: Flag = False
    prediction: Prediction = "flow"
    negated: Flag = False
    guidance: Positive = 1.0
    latents_name: Name = "hidden_states"
    time_name: Name = "timestep"
    alone: tuple[Name, ...] = ()
    listed: tuple[Name, ...] = ()


def kind_of(name: str, said: Mapping[str, Any] | None) -> Kind:
    """The kind of a transformer of this type, and as it is `said`. InputError where neither is known, or one of the keys is
    wrong."""
    own = _table().get(name)
    if own is None and said is None:
        raise InputError(
            f"it is not known how a {name} is called. Write it as the data's argument kind, such as {{time: 1000}} where it is "
            f"told times up to 1000 and predicts the way from latents to noise; keys are {', '.join(Kind.model_fields)}"
        )
    return validated(Kind, {**(own or {}), **(said or {})}, f"kind of {name}", "kind")


@cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    return read_mapping(TABLE)  # type: ignore[no-any-return]
