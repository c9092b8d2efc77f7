"""Number types of each device: what is sent between unlike ones, gradients, and several precisions in one profile."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetpipe
from hetpipe import InputError
from hetpipe.documents.number_types import AS_BUILT, NumberTypes, Precision
from hetpipe.documents.plan import Backend, Plan
from hetpipe.documents.profile import Profile
from hetpipe.layers.model import Loss, Model, as_tuple, mse, select
from hetpipe.layers.numbers import computing, stage_types
from hetpipe.layers.untouched.boundaries import trace_boundaries
from hetpipe.processes.world import World
from hetpipe.runtime import backends
from hetpipe.runtime.plan_engine import PlanEngine
from tests.support.commands import Command
from tests.support.jobs import Folder, train
from tests.support.nets import batch, build
from tests.support.ranks import cluster_of, make_plan, run_ranks
from tests.support.user_parts import Centre

LONG, SHORT = NumberTypes.of("float64"), NumberTypes.of("float32")
ROWS = [{"cuts": [4, 3, 3], "sizes": [3, 2]}]
TYPES = {"n0/0": LONG, "n0/1": SHORT, "n0/2": LONG}  # of device types, in a plan with a cluster


def test_what_is_sent_has_no_more_bits_than_either_end() -> None:
    half = NumberTypes.of("float32", "fp16")
    assert LONG.sent("float64", SHORT) == SHORT.sent("float32", LONG) == "float32"
    assert half.sent("float16", SHORT) == "float16", "the receiver widens it, and loses nothing"
    assert half.sent("float32", SHORT) == SHORT.sent("float32", half) == "float32", "what is added up from layer to layer"
    assert AS_BUILT.sent("float64", AS_BUILT) == "float64"
    assert (half.loss_is_scaled, half.summed, half.entered) == (True, "float32", None)
    assert NumberTypes.of("float32", "fp32") == SHORT


def test_both_ends_of_each_boundary_see_what_is_sent() -> None:
    layers, inputs = build("blocks"), batch("blocks", 3, 0)[0]
    stages = stage_types([(0, 4), (4, 7), (7, 10)], [LONG, SHORT, LONG])
    found = [row[0].dtype for row in trace_boundaries(layers, inputs, stages=stages)]
    long, short = torch.float64, torch.float32
    assert found == [long, *[long] * 3, short, *[short] * 3, *[long] * 3]
    mixed = stage_types([(0, 5), (5, 10)], [NumberTypes.of("float32", "bf16"), SHORT])
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    found = [row[0].dtype for row in trace_boundaries(plain, torch.ones(2, 4), stages=mixed)]
    assert found == [short, *[torch.bfloat16] * 5, *[short] * 5]


def typed_engine(world: World, plan: Plan, backend: Backend, layers: nn.Sequential) -> PlanEngine:
    inputs, targets = batch("blocks", 5, 0)
    model = Model(name=plan.model, layers=layers, inputs=inputs, targets=targets, loss=Loss(function=mse))
    engine = backends.open_engine(
        backend,
        model,
        plan,
        backends.seat(world, backend, plan),
        lambda _: torch.device("cpu"),
        lambda _: None,
        TYPES.__getitem__,
    )
    assert engine is not None
    return engine


def typed_step(world: World, plan: Plan, backend: Backend) -> dict[str, Any]:
    layers, (inputs, targets) = build("blocks"), batch("blocks", 5, 0)
    engine = typed_engine(world, plan, backend, layers)
    loss = engine.step(inputs, targets)
    gradients = {name: p.grad.clone() for name, p in engine.named_parameters() if p.grad is not None}
    evaluation = engine.evaluate(inputs, targets).loss
    engine.close()
    coupled = build("blocks")
    coupled[8] = Centre()
    engine = typed_engine(world, plan, backend, coupled)
    with pytest.raises(InputError) as refused:
        engine.step(inputs, targets)
    engine.close()
    return {"loss": loss, "gradients": gradients, "evaluation": evaluation, "told": str(refused.value)}


class Turned(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def one_device() -> tuple[float, dict[str, Tensor]]:
    """The same layers in the same types, micro-batch by micro-batch."""
    layers = build("blocks")
    own = list(layers)
    for layer in own[4:7]:
        layer.float()
    parts = [*own[:4], Turned(torch.float32), *own[4:7], Turned(torch.float64), *own[7:]]
    (x, y), total = batch("blocks", 5, 0), 0.0
    for rows in (slice(0, 3), slice(3, 5)):
        loss = mse(nn.Sequential(*parts)(select(x, rows)), select(y, rows)) * (len(as_tuple(select(x, rows))[0]) / 5)
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in layers.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("backend", ["torch", "fairscale", "torchgpipe"])
def test_a_stage_in_float32_between_two_in_float64_is_exact(backend: Backend) -> None:
    """To rounding what one device gives that computes in the same types; to float32's what it gives in float64."""
    plan = make_plan(ROWS, schedule="gpipe")
    found = run_ranks(typed_step, cluster_of(3 if backend == "torch" else 1), plan, backend)
    gradients: dict[str, Tensor] = {}
    for part in found:
        gradients |= part["gradients"]
    assert all(part["told"].startswith("layer '8' (Centre) couples the samples of a batch") for part in found), "layers are tried"
    loss, wanted = one_device()
    assert {g.dtype for name, g in gradients.items() if name[0] in "456"} == {torch.float32}
    assert {g.dtype for name, g in gradients.items() if name[0] not in "456"} == {torch.float64}
    assert found[0]["loss"] == found[0]["evaluation"] == pytest.approx(loss, abs=1e-12)
    assert gradients.keys() == wanted.keys()
    layers, (x, y) = build("blocks"), batch("blocks", 5, 0)
    mse(layers(x), y).backward()
    for name, p in layers.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(gradients[name], wanted[name], rtol=0, atol=1e-12 if name[0] in "789" else 1e-7)
        torch.testing.assert_close(gradients[name].double(), p.grad, rtol=0, atol=1e-6)
    assert any(not torch.equal(gradients[name].double(), p.grad) for name, p in layers.named_parameters())  # type: ignore[arg-type]


def test_replicas_that_would_hold_a_layer_in_two_types_are_refused() -> None:
    plan = make_plan([{"cuts": [4, 6], "sizes": [3]}, {"cuts": [10], "sizes": [2]}])
    types = {"n0/0": LONG, "n0/1": SHORT, "n1/0": LONG}.__getitem__
    with pytest.raises(InputError, match="layer 4 is held in float32 by n0/1 and in float64 by n1/0: both sum their gradients"):
        backends.refuse_sums(plan, {}, types)
    alone = make_plan([{"cuts": [4, 6], "sizes": [3]}])
    backends.refuse_sums(alone, {"0.weight": (0, 2)}, types)
    with pytest.raises(InputError, match="the parameter '0.weight', which layers share, is held in float64 by n0/0 and in float"):
        backends.refuse_sums(alone, {"0.weight": (0, 9)}, types)


def test_types_that_are_said_do_not_follow_the_callers_autocast() -> None:
    layer, x, cpu = nn.Linear(4, 4), torch.ones(2, 4), torch.device("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        with computing(SHORT, cpu):
            assert layer(x).dtype == torch.float32
        with computing(AS_BUILT, cpu):
            assert layer(x).dtype == torch.bfloat16
    with computing(NumberTypes.of("float32", "bf16"), cpu):
        assert layer(x).dtype == torch.bfloat16


def test_several_precisions_are_measured_in_one_profile(folder: Folder, run: Command) -> None:
    """Here of an emulated device that has two, each with a slowdown of its own; a plan chooses among them."""
    file = folder.job(
        plan={"partitioner": "auto"}, profile=None, train=train(dtype="float32"), profiler={"microbatch_sizes": [1], "repeats": 1}
    )
    folder.cluster(2, slowdown={"bf16": 2.0, "fp32": 3.0})
    ended = run("profile", file, "--precision", "auto", "-o", "measured.json")
    assert ended.code == 0, ended.err
    profile = folder.read("measured.json")
    assert [(m["device_type"], m["precision"]) for m in profile["measurements"]] == [("cpu", "bf16"), ("cpu", "fp32")]
    own = ("saved_bytes_per_sample", "output_bytes_per_sample", "cast_bytes")
    assert [[key in m for key in own] for m in profile["measurements"]] == [[True] * 3, [False] * 3]
    assert (profile["host"]["precision"], [m["precision"] for m in profile["hosts"]]) == ("fp32", ["bf16"])
    assert "cuda.matmul.fp32_precision" in profile["provenance"]["arithmetic"]
    read = Profile.load(folder.path / "measured.json")
    assert json.loads(read.to_json()) == profile
    factors: dict[Precision, float] = {"bf16": 2.0, "fp32": 3.0}
    for precision, slowdown in factors.items():
        found = read.at({"cpu": precision}).measurement("cpu")
        assert (found.forward >= slowdown * read.host_at(precision).forward).all(), "sleeping cannot end early"
    options = ("--global-batch", 4, "--precision", "fp32", "-o", "chosen.json")
    plan = run("plan", "--profile", "measured.json", "--cluster", "cluster.yaml", *options)
    assert plan.code == 0, plan.err
    assert folder.read("chosen.json")["precision"] == {"cpu": "fp32"}
    refused = run("profile", file, "-o", "measured.json", "--precision", "bf16", "--set", "train.dtype=float64")
    assert refused.code == 2
    assert "precision is 'bf16', which needs parameters in float32, but parameters of this model are" in refused.err


def own(dtype: torch.dtype, *, trained: bool = False) -> nn.Sequential:
    """One layer, with a matrix of its own beside those of a linear layer."""
    layer = nn.Linear(2, 2)
    bits = torch.tensor([[1, 2], [3, 130]], dtype=torch.uint8)
    numbers = bits.view(dtype) if dtype.itemsize == 1 else bits.to(dtype)
    layer.own = nn.Parameter(numbers, requires_grad=trained)
    return nn.Sequential(layer)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.detach().view(torch.uint8), b.detach().view(torch.uint8))


NARROW = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.uint8,
    torch.int8,
)


def test_parameters_in_which_nothing_computes_are_left_to_their_layers_where_they_do_not_train(tmp_path: Path) -> None:
    """With a precision a frozen matrix in float8 was refused, which the caller's autocast took."""
    rows, plan, cases = torch.zeros(2, 2), make_plan([{"cuts": [1], "sizes": [2]}]), list[tuple[Any, Any, str | None]]()
    cases += [(own(dtype), precision, None) for dtype in NARROW for precision in (None, "fp32", "bf16", "fp16")]
    told = "which is of matrix products of parameters in float32, but parameters are "
    cases += [(own(torch.float8_e5m2, trained=True), "bf16", f"{told}float8_e5m2: train them in float32")]
    cases += [(own(torch.float64), "bf16", f"{told}float64"), (own(torch.bfloat16, trained=True), "bf16", f"{told}bfloat16")]
    cases += [(own(torch.bfloat16), "bf16", None), (own(torch.float16), "bf16", None)]
    cases += [(own(torch.bfloat16), "fp32", "held in bfloat16, but device n0/0 computes in float32, for which they would have")]
    for layers, precision, words in cases:
        before = layers[0].own
        kept = before.detach().clone()
        with pytest.raises(InputError, match=words) if words is not None else nullcontext():
            engine = hetpipe.wrap(layers, plan, rows, nn.functional.mse_loss, precision=precision)
            engine.step(rows, rows)
            assert engine.parameters_are_finite()
            optimizer = torch.optim.AdamW(engine.trained_parameters())
            hetpipe.save_checkpoint(engine, optimizer, tmp_path, 1, keep=1)
            hetpipe.load_checkpoint(engine, optimizer, tmp_path)
            engine.close()
            other = own(before.dtype)
            other.get_parameter("0.own").data.zero_()
            hetpipe.load_weights(other, tmp_path)
            assert same_bits(other.get_parameter("0.own"), before)
        assert layers[0].own is before
        assert same_bits(before, kept)
    torch.distributed.destroy_process_group()
