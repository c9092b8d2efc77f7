"""In what the devices of a plan compute, decided once: what is asked for, what the plan says, what was measured, and in what
parameters are held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hetpipe import InputError, make_plan
from hetpipe.documents.precisions import HeldTypes, decide, in_job, turns
from hetpipe.documents.profile import Profile
from hetpipe.layers.numbers import type_name
from hetpipe.training.session import Setting
from tests.support.strategies import make_cluster
from tests.test_precision import CLUSTER, profile

FULL, LOW = HeldTypes(), HeldTypes(low=frozenset(("bfloat16",)))
DOUBLE, SAID_HALF = HeldTypes(frozenset(("float64",))), HeldTypes(frozenset(("bfloat16",)), said=True)
SAID_LOW = HeldTypes(low=frozenset(("bfloat16",)), said=True)
SEVERAL = profile()  # a: fp32, fp16 (fastest); b: fp32 (fastest), fp16, bf16
SINGLE = profile(speed={"a": {"fp16": 1.0}, "b": {"fp32": 3.0}})
MIXED = {"a": "fp16", "b": "fp32"}
BOTH_HALF = {"a": "fp16", "b": "bf16"}


@pytest.mark.parametrize(
    ("asked", "planned", "measured", "held", "found"),
    [
        # nothing is asked for
        (None, None, None, FULL, None),
        (None, None, SEVERAL, FULL, {"a": "fp32", "b": "fp32"}),
        (None, None, SINGLE, FULL, None),  # as measured
        (None, MIXED, None, FULL, MIXED),
        (None, MIXED, SEVERAL, FULL, MIXED),
        # one for all
        ("bf16", None, None, FULL, {"a": "bf16", "b": "bf16"}),
        ("fp16", None, SEVERAL, FULL, {"a": "fp16", "b": "fp16"}),
        ("fp16", {"a": "fp16", "b": "fp16"}, SEVERAL, FULL, {"a": "fp16", "b": "fp16"}),
        ("bf16", MIXED, None, FULL, "the plan computes in fp16 on 'a', but precision says bf16"),
        # by type: what is not named is fp32 where that is one of several, and as measured where it is alone
        ({"a": "fp16"}, None, None, FULL, {"a": "fp16"}),
        ({"a": "fp16"}, None, SEVERAL, FULL, MIXED),
        ({"b": "fp32"}, None, SINGLE, FULL, {"b": "fp32"}),
        ({"a": "fp16"}, MIXED, SEVERAL, FULL, MIXED),
        ({"b": "fp16"}, MIXED, SEVERAL, FULL, "the plan computes in fp16 on 'a', but precision says fp32"),
        ({"c": "fp16"}, None, None, FULL, "precision: unknown device type 'c'"),
        # the fastest
        ("auto", None, None, FULL, None),  # until it is measured
        ("auto", None, SEVERAL, FULL, MIXED),
        ("auto", BOTH_HALF, SEVERAL, FULL, BOTH_HALF),
        # parameters of other types
        (None, None, None, DOUBLE, None),
        ("fp32", None, None, DOUBLE, "the plan computes in fp32 on 'a', fp32 on 'b', .* parameters are float64: train them"),
        ("bf16", None, None, SAID_HALF, "parameters are bfloat16: train them in float32, or plan without a precision"),
        (None, None, None, SAID_HALF, None),
        # parameters that do not train in fewer bits
        (None, None, None, LOW, None),  # in the caller's autocast
        (None, None, None, SAID_LOW, "held in bfloat16, but device n0/0 computes in float32"),
        ("auto", None, None, SAID_LOW, None),  # until it is measured
        ("bf16", None, None, SAID_LOW, {"a": "bf16", "b": "bf16"}),
        (None, MIXED, None, LOW, "held in bfloat16, but device n1/0 computes in float32, .*: let all devices compute in bf16"),
        (None, BOTH_HALF, SEVERAL, SAID_LOW, BOTH_HALF),
        ({"a": "fp16"}, None, SEVERAL, LOW, "device n1/0 computes in float32"),
    ],
)
def test_what_a_plan_computes_in(
    asked: Any, planned: dict[str, str] | None, measured: Profile | None, held: HeldTypes, found: dict[str, str] | str | None
) -> None:
    cluster = make_cluster([{"a": 1}, {"b": 1}], memory=10_000)
    plan = make_plan(SEVERAL, cluster, 8, precision="fp32", partitioner="even").model_copy(update={"precision": planned})
    assert {cluster.device(d).type for d in plan.device_ids} == {"a", "b"}
    if isinstance(found, str):
        with pytest.raises(InputError, match=found):
            decide(asked, plan, measured, cluster, held)
    else:
        assert decide(asked, plan, measured, cluster, held) == found


def test_with_which_choices_one_plans() -> None:
    assert turns(None, SEVERAL, CLUSTER) == [{}]
    assert turns("fp16", SEVERAL, CLUSTER) == [{"a": "fp16", "b": "fp16"}]
    assert turns({"a": "fp16"}, SEVERAL, CLUSTER) == [{"a": "fp16"}]
    assert turns({"b": "bf16"}, SEVERAL, CLUSTER, others_auto=True)[0] == BOTH_HALF
    assert in_job("auto", SEVERAL, CLUSTER) == "auto"
    assert in_job(None, SINGLE, CLUSTER) is None
    alone = make_cluster([{"b": 1}], memory=10_000)
    assert turns("auto", SEVERAL, alone)[0] == MIXED, "types that a part of the cluster lacks are at theirs, too"


@pytest.mark.parametrize(
    ("dtype", "frozen", "said", "found"),
    [
        ("float32", "float32", None, FULL),
        ("float32", "bfloat16", None, LOW),
        ("float32", "bfloat16", "float32", SAID_LOW),
        ("float64", "float64", None, DOUBLE),
        ("float32", "float32", "bfloat16", SAID_HALF),
    ],
)
def test_what_a_model_holds(dtype: str, frozen: str, said: Any, found: HeldTypes) -> None:
    def layer(name: str, trains: bool) -> nn.Linear:
        made = nn.Linear(2, 2).to(getattr(torch, name)).requires_grad_(trains)
        assert type_name(made.weight.dtype) == name
        return made

    setting = Setting.__new__(Setting)
    layers = nn.Sequential(layer(frozen, False), layer(dtype, True))
    object.__setattr__(setting, "model", type("M", (), {"layers": layers}))
    object.__setattr__(setting, "held", said)
    assert setting.held_types == found
