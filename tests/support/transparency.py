"""One training case, run by a plan on its ranks, and on one device: what `test_transparency.py` compares."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.reference import ReferenceEngine
from hetpipe.building.evaluated import counted_by
from hetpipe.documents.job import BatchNorm, CoupledLayers
from hetpipe.documents.plan import Backend, Plan
from hetpipe.documents.profiles.measurement import Measurement
from hetpipe.layers.device import Emulation, one_thread
from hetpipe.layers.model import Loss, Model, Tensors, as_tuple, as_value, class_weight, cross_entropy, mse, select, split_rows
from hetpipe.layers.shards.split import pieces_in
from hetpipe.processes.whereabouts import describe_with
from hetpipe.processes.world import World
from hetpipe.runtime import backends, gradients
from hetpipe.runtime.backends import check_backend, seat
from hetpipe.runtime.base import Engine, Evaluation
from hetpipe.runtime.plan_engine import PlanEngine
from hetpipe.runtime.stages.engine import TorchEngine
from tests.support.blocks import WORDS
from tests.support.nets import LAYERS, batch, build, copied, preference
from tests.support.ranks import make_plan

# Of the words of "tied": three of them count for nothing, and the sum of the others is not exact.
CLASS_WEIGHTS = tuple(0.0 if word % 4 == 3 else 0.1 + word / 7 for word in range(WORDS))


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """`plan`: one row a replica (see `make_plan`). `shares`: samples of each replica, step by step (default: all that the plan
    gives). `evaluate`: samples of each replica in an evaluation before each step. `lengths`: of samples, step by step."""

    name: str
    plan: tuple[dict[str, Any], ...]
    net: str = "blocks"
    schedule: str = "1f1b"
    optimizer: str = "SGD"
    clip: float | None = None
    shares: tuple[tuple[int, ...], ...] | None = None
    evaluate: tuple[int, ...] | None = None
    lengths: tuple[int, ...] = ()
    zero_grad: bool = False
    reference_in_microbatches: bool = False
    class_weights: bool = False
    emulated: bool = False
    steps: int = 5
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        return self.name.replace(" ", "_")

    def make_plan(self) -> Plan:
        return make_plan(self.plan, schedule=self.schedule)

    def shares_of(self, step: int) -> tuple[int, ...]:
        return self.shares[step % len(self.shares)] if self.shares else tuple(sum(row["sizes"]) for row in self.plan)

    def batch(self, samples: int, step: int) -> tuple[Tensors, Tensors]:
        """Inputs and targets of a step, of the step's length."""
        whole = batch(self.net, samples, step, self.dtype)
        if not self.lengths:
            return whole
        length = self.lengths[step % len(self.lengths)]
        inputs, targets = whole
        if self.net != "pictures":
            targets = as_value([t[:, :length] for t in as_tuple(targets)])
        return as_value([t[:, :length] for t in as_tuple(inputs)]), targets

    def loss(self) -> Loss:
        if self.class_weights:
            return Loss(
                function=partial(cross_entropy, class_weights=CLASS_WEIGHTS),
                weight=partial(class_weight, class_weights=CLASS_WEIGHTS),
            )
        if self.net.startswith("tied"):
            return Loss(function=cross_entropy, weight="tokens")
        if self.net.startswith("pairs"):
            return Loss(function=preference)
        return Loss(function=cross_entropy if self.net == "dropout and BatchNorm" else mse)

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer == "AdamW":
            return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)
        return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


class Trained(NamedTuple):
    """What a rank (or the one device) has after the steps."""

    replica: int
    losses: list[float]
    norms: list[float]
    evaluations: list[Evaluation]
    state: dict[str, Tensor]
    without_gradient: set[str]
    memory: list[int]


# An emulated device that waits for nothing and has plenty of memory, all of it counted.
_NOTHING = ((0.0,) * LAYERS,)
AT_ONCE = Emulation(
    slowdown=1.0,
    memory_bytes=1 << 30,
    host=Measurement(
        device_type="host",
        microbatch_sizes=(1,),
        forward_seconds=_NOTHING,
        backward_seconds=_NOTHING,
        optimizer_seconds=_NOTHING[0],
    ),
)


def share(value: Tensors, shares: tuple[int, ...], replica: int) -> Tensors:
    """A replica's rows of a global batch."""
    begin = sum(shares[:replica])
    return select(value, slice(begin, begin + shares[replica]))


def _whole(inputs: Tensors, targets: Tensors, _shares: tuple[int, ...]) -> tuple[Tensors | None, Tensors | None]:
    return inputs, targets


def _train(case: Case, engine: Engine, module: nn.Module, part: Any, replica: int) -> Trained:
    optimizer = case.make_optimizer(engine.trained_parameters())
    losses, norms, evaluations, memory = [], [], [], []
    meter = engine.recorders[0].meter if isinstance(engine, PlanEngine) else None
    for step in range(max(1, case.steps)):
        if case.evaluate is not None:
            whole = case.batch(sum(case.evaluate), 50 + step)
            inputs, targets = part(*whole, case.evaluate)
            evaluations.append(engine.evaluate(inputs, targets, counted_by(case.loss())))
        if case.steps == 0:
            break
        shares = case.shares_of(step)
        inputs, targets = case.batch(sum(shares), step)
        losses.append(engine.step(*part(inputs, targets, shares)))
        if case.clip is not None:
            norms.append(engine.clip_grad_norm_(case.clip))
        if meter is not None:
            memory.append(meter.used)
        without = {name for name, p in module.named_parameters() if p.grad is None}
        optimizer.step()
        if case.zero_grad:
            optimizer.zero_grad()
    pieces = pieces_in(module)
    state = {name: copied(pieces[name].joined(v) if name in pieces else v) for name, v in module.state_dict().items()}
    return Trained(replica, losses, norms, evaluations, state, without if case.steps else set(), memory)


class _InMicrobatches(ReferenceEngine):
    """One device that takes the micro-batches of the plan one after the other: for nets that look at their size."""

    def __init__(self, layers: nn.Sequential, case: Case) -> None:
        super().__init__(layers, case.loss())
        self.sizes = [size for row in case.plan for size in row["sizes"]]

    def step(self, inputs: Tensors | None, targets: Tensors | None) -> float:
        assert inputs is not None
        assert targets is not None
        self.layers.zero_grad()
        total = 0.0
        for x, y in zip(split_rows(inputs, self.sizes), split_rows(targets, self.sizes), strict=True):
            loss = self.loss.share(self.layers(x), y, self.loss.count(targets))
            loss.backward()
            total += float(loss.detach())
        return total


def train_on_one_device(case: Case, *, layers: nn.Sequential | None = None) -> Trained:
    """The truth."""
    net = build(case.net, case.dtype) if layers is None else layers
    with one_thread(torch.device("cpu")):
        engine = _InMicrobatches(net, case) if case.reference_in_microbatches else ReferenceEngine(net, case.loss())
        return _train(case, engine, net, _whole, 0)


def open_engine(
    world: World,
    plan: Plan,
    layers: nn.Sequential,
    inputs: Tensors,
    targets: Tensors,
    loss: Loss,
    emulation: Emulation | None = None,
    backend: Backend = "torch",
    batch_norm: BatchNorm | None = None,
    coupled_layers: CoupledLayers | None = None,
) -> Any:
    """This rank's engine; None where the plan leaves it unused."""
    check_backend(backend, plan)
    model = Model(
        name=plan.model,
        layers=layers,
        inputs=inputs,
        targets=targets,
        loss=loss,
        batch_norm=batch_norm,
        coupled_layers=coupled_layers,
    )
    return backends.open_engine(
        backend, model, plan, seat(world, backend, plan), lambda _: torch.device("cpu"), lambda _: emulation
    )


def _groups_of(engine: PlanEngine) -> Iterator[dist.ProcessGroup]:
    if isinstance(engine, TorchEngine):
        yield engine._lanes.activations
    yield from (b.process_group for b in engine.sync._buckets if b.process_group is not None)


def train_cases(world: World, cases: list[Case], backend: Backend = "torch") -> list[Trained | None]:
    """A rank's part of all cases, one after the other. Layers are tried in every other pair of cases, and in the others the
    user has accepted them as they are."""
    results: list[Trained | None] = []
    for number, case in enumerate(cases):
        vars(gradients)["BUCKET_BYTES"] = 25 * 2**20 if number % 2 else 100  # one bucket a group, and many
        accepted: CoupledLayers | None = "per_microbatch" if number % 4 < 2 else None
        describe_with(f"device {world.device_id}, case {case.name!r}")
        plan, layers = case.make_plan(), build(case.net, case.dtype)
        engine = open_engine(
            world,
            plan,
            layers,
            *batch(case.net, 3, 0, case.dtype),
            case.loss(),
            emulation=AT_ONCE if case.emulated else None,
            backend=backend,
            coupled_layers=accepted,
        )
        if engine is None:
            results.append(None)
            continue
        is_first, is_last = engine.is_first, engine.is_last

        def part(inputs: Tensors, targets: Tensors, shares: tuple[int, ...], engine: PlanEngine = engine) -> Any:
            mine = shares[engine.replica]
            if mine == 0:
                return None, None
            return (
                share(inputs, shares, engine.replica) if engine.is_first else None,
                share(targets, shares, engine.replica) if engine.is_last else None,
            )

        assert is_first or is_last or part(*batch(case.net, 40, 0), case.shares_of(0)) == (None, None)
        results.append(_train(case, engine, engine.stage, part, engine.replica))
        engine.close()
        for group in set(_groups_of(engine)):
            dist.destroy_process_group(group)
    return results


def largest_difference(trained: Iterable[Trained], truth: Trained) -> float:
    """Greatest distance of any number that any rank holds from that of the one device. Each replica must hold every number."""
    worst = 0.0
    names: dict[int, set[str]] = {}
    for result in trained:
        names.setdefault(result.replica, set()).update(result.state)
        for name, value in result.state.items():
            distance = (value.double() - truth.state[name].double()).abs()
            worst = max(worst, float(distance.max()) if distance.isfinite().all() else float("inf"))
    assert names, "nobody holds anything"
    assert all(held == set(truth.state) for held in names.values()), "a replica lacks layers"
    return worst
