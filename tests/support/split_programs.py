"""What ranks run of which some share a stage: one step beside one device, wrong rules, checkpoints, kinds of models."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.reference import ReferenceEngine
from hetpipe.checkpoints import checkpoint
from hetpipe.documents.number_types import NumberTypes, Precision
from hetpipe.documents.plan import Plan
from hetpipe.files.messages import InputError
from hetpipe.layers.adapters.adapt import adapt
from hetpipe.layers.model import Loss, Model, Tensors, cross_entropy, mse, select
from hetpipe.layers.numbers import turn
from hetpipe.layers.shards.split import pieces_in
from hetpipe.processes.whereabouts import describe_with
from hetpipe.processes.world import World
from hetpipe.runtime import backends
from hetpipe.runtime.checks.stale import set_aside
from hetpipe.runtime.plan_engine import PlanEngine
from tests.support.jobs import STATE
from tests.support.nets import batch, build
from tests.support.ranks import make_plan
from tests.support.splittable import every_style
from tests.support.transparency import open_engine, share
from tests.support.wrong_rules import WRONG, Ruled

Row = dict[str, Any]


def engine_of(
    world: World, plan: Plan, layers: nn.Sequential, inputs: Tensors, targets: Tensors, loss: Loss
) -> PlanEngine | None:
    found: PlanEngine | None = open_engine(world, plan, layers, inputs, targets, loss)
    return found


def step(engine: PlanEngine, plan: Plan, inputs: Tensors, targets: Tensors) -> float:
    """One step of a global batch that every rank has."""
    shares = tuple(replica.samples for replica in plan.replicas)
    return engine.step(
        share(inputs, shares, engine.replica) if engine.is_first else None,
        share(targets, shares, engine.replica) if engine.is_last else None,
    )


def leave(engine: PlanEngine | None) -> None:
    if engine is not None:
        engine.leave()


def gradients_apart(engine: PlanEngine, reference: nn.Module) -> float:
    """The greatest distance of a gradient of this rank from that of one device, by the largest number of it."""
    pieces, truth, worst = pieces_in(engine.stage), dict(reference.named_parameters(remove_duplicate=False)), 0.0
    for name, parameter in engine.stage.named_parameters():
        wanted = truth[name].grad
        assert (parameter.grad is None) == (wanted is None), name
        if wanted is not None and parameter.grad is not None:
            own = pieces[name].shard(wanted) if name in pieces else wanted
            worst = max(worst, float((parameter.grad - own).abs().max()) / max(float(wanted.abs().max()), 1e-3))
    return worst


# ---- models of the zoo, and of transformers ----

LANGUAGE = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16}
ADAPTER = ("r", "use_dora", "base")


def language_model(kind: str, options: Row) -> nn.Sequential:
    """In float64, without dropout."""
    from hetpipe.layers.weights import materialise
    from hetpipe.planning.registry import model

    torch.manual_seed(0)
    own = {"attention": "eager", **{key: value for key, value in options.items() if key not in ADAPTER}}
    layers: nn.Sequential = model(kind)(**own) if kind in ("bert", "t5") else model("causal_lm")(type=kind, **own)
    if "r" in options:
        layers = adapt(layers, seed=1, alpha=4, **{key: options[key] for key in ADAPTER if key in options})
    materialise(layers)
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.linspace(-0.3, 0.4, parameter.numel()).view_as(parameter))
    turn(layers, "float64")
    return layers


def zoo_model(kind: str, options: Row) -> nn.Sequential:
    from hetpipe.planning.registry import model

    torch.manual_seed(0)
    layers: nn.Sequential = model(kind)(**options)
    turn(layers, "float64")
    return layers


def samples(kind: str, count: int) -> tuple[Tensors, Tensor, Loss]:
    """So many inputs and targets for a model of this kind, some with padding, and its loss."""
    draw = torch.Generator().manual_seed(1)
    words, others = (torch.randint(32, (count, 6), generator=draw) for _ in range(2))
    mask = torch.arange(6) < torch.randint(2, 7, (count, 1), generator=draw)
    if kind == "mlp":
        numbers = torch.randn(count, 32, generator=draw, dtype=torch.float64)
        return numbers, torch.randint(10, (count,), generator=draw), Loss(function=cross_entropy)
    if kind == "bert":
        return (words, mask), torch.randint(5, (count,), generator=draw), Loss(function=cross_entropy)
    inputs = (words, mask, others.roll(1, 1)) if kind == "t5" else words
    return inputs, others, Loss(function=cross_entropy, weight="tokens")


def compared(world: World, cases: dict[str, tuple[str, Row, tuple[Row, ...] | Plan]]) -> dict[str, Any]:
    """Of each case (model, its options, a plan or its rows): how far gradients are from those of one device, the losses of both,
    and how many tensors are shards here; or what is said of it."""
    found = dict[str, Any]()
    for name, (kind, options, planned) in cases.items():
        plan = planned if isinstance(planned, Plan) else make_plan(planned)
        make, engine = zoo_model if kind in ("gpt", "mlp") else language_model, None
        inputs, targets, loss = samples(kind, plan.global_batch)
        try:
            reference = ReferenceEngine(make(kind, options), loss)
            truth = reference.step(inputs, targets)
            engine = engine_of(world, plan, make(kind, options), select(inputs, slice(2)), targets[:2], loss)
            if engine is not None:
                own = step(engine, plan, inputs, targets)
                found[name] = gradients_apart(engine, reference.layers), own - truth, len(pieces_in(engine.stage))
        except InputError as error:
            found[name] = str(error)
        if not isinstance(found.get(name), str):
            leave(engine)
    return found


# ---- wrong rules ----


def change_rule(layer: Any, changes: Row) -> None:
    """Give modules of a layer other styles; None: no style."""
    rule = {**layer.tensor_parallel, **changes}
    layer.tensor_parallel = {module: style for module, style in rule.items() if style is not None}


def said_of(world: World, plan: Plan, layers: nn.Sequential, inputs: Tensors, targets: Tensors, loss: Loss) -> str | None:
    """Return how the first step of these layers is refused; None if it is not."""
    engine = engine_of(world, plan, layers, inputs, targets, loss)
    try:
        assert engine is not None
        step(engine, plan, inputs, targets)
    except InputError as error:
        return str(error)
    finally:
        leave(engine)
    return None


def tried(world: World, names: list[str]) -> dict[str, str | None]:
    """What is said of a chain with this wrong rule in its first step; None: nothing."""
    found, plan = dict[str, str | None](), make_plan([{"cuts": [2, 1], "sizes": [3, 2], "widths": [2, 1]}])
    for name in names:
        kind, changes = WRONG[name]
        torch.manual_seed(0)
        layers = nn.Sequential(Ruled(), kind(), nn.Linear(8, 8)).double()
        change_rule(layers[1], changes)
        found[name] = said_of(world, plan, layers, *batch("blocks", plan.global_batch, 0), Loss(function=mse))
    return found


def tried_in(world: World, cases: dict[str, tuple[str, Row, Row, int, dict[str, str | None]]]) -> dict[str, str | None]:
    """What is said of models (kind, options, a row of a plan) in their first step if in the rule of one layer these styles are
    others, or missing; None: nothing."""
    found = dict[str, str | None]()
    for name, (kind, options, row, layer, changes) in cases.items():
        plan, layers = make_plan([row]), language_model(kind, options)
        change_rule(layers[layer], changes)
        found[name] = said_of(world, plan, layers, *samples(kind, plan.global_batch))
    return found


# ---- half precision, and sums of several steps ----


def in_half(world: World, precision: Precision | None) -> dict[str, Any]:
    """Losses of a few steps of parameters in float32, which compute in this precision."""
    plan, types = make_plan([{"cuts": [4, 6], "sizes": [3, 2], "widths": [1, 2]}]), NumberTypes.at(precision)
    layers, (inputs, targets) = build("splittable", torch.float32), batch("splittable", 5, 0, torch.float32)
    model = Model(name="test", layers=layers, inputs=inputs, targets=targets, loss=Loss(function=mse))
    engine = backends.open_engine("torch", model, plan, world, lambda _: torch.device("cpu"), lambda _: None, lambda _: types)
    assert engine is not None
    optimizer, losses = torch.optim.SGD(engine.parameters(), lr=0.1), list[float]()
    for _ in range(4):
        losses.append(step(engine, plan, inputs, targets))
        optimizer.step()
    leave(engine)
    return {"losses": losses}


def accumulated(world: World) -> dict[str, float]:
    """How far gradients of three steps together are from those of one device, on widths 2 and 1, and on a replica beside them."""
    plan = make_plan([{"cuts": [6, 4], "sizes": [2, 2], "widths": [2, 1]}, {"cuts": [10], "sizes": [3]}])
    parts = [batch("splittable", plan.global_batch, number) for number in range(3)]
    inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
    reference = ReferenceEngine(build("splittable"), Loss(function=mse))
    reference.step(inputs, targets)
    engine = engine_of(world, plan, build("splittable"), *parts[0], Loss(function=mse))
    if engine is None:
        return {}
    with engine.accumulate():
        for x, y in parts:
            step(engine, plan, x, y)
    found = {"apart": gradients_apart(engine, reference.layers), "norm": engine.grad_norm() - reference.clip_grad_norm_(1e9)}
    leave(engine)
    return found


# ---- any plan ----


def drawn_rows(draw: random.Random, devices: int) -> list[Row]:
    """Replicas over some of so many devices, of stages of unlike widths, in any order of the schedule that is allowed."""
    rows, free = list[Row](), devices
    while free and len(rows) < 3:
        widths, left = list[int](), draw.randint(1, free)
        while left and len(widths) < 4:
            widths.append(draw.choice([w for w in (1, 1, 2, 3) if w <= left]))
            left -= widths[-1]
        cuts = [0, *sorted(draw.sample(range(1, 10), len(widths) - 1)), 10]
        row: Row = {"cuts": [b - a for a, b in pairwise(cuts)], "sizes": draw.choices((1, 2, 3), k=draw.randint(1, 4))}
        if draw.random() < 0.5:
            first = draw.randint(len(widths), len(widths) + 3)
            row["warmup"] = [first - s for s in range(len(widths))]
        row |= {"widths": widths, "recompute": draw.random() < 0.3, "offload": False}
        rows.append(row)
        free -= sum(widths)
    return rows


def in_any_plan(world: World, seed: int, count: int) -> float:
    """The greatest distance of a gradient of this rank from that of one device, in so many plans."""
    draw, worst = random.Random(seed), 0.0
    for _ in range(count):
        rows, gpipe, devices = drawn_rows(draw, len(world.rank_of)), draw.random() < 0.3, list(world.rank_of)
        draw.shuffle(devices)  # of one node
        document, taken = make_plan(rows, schedule="gpipe" if gpipe else "1f1b").model_dump(), iter(devices)
        for stage in (stage for replica in document["replicas"] for stage in replica["stages"]):
            stage["devices"] = [next(taken) for _ in stage["devices"]]
        plan = Plan.parse(document, "a drawn plan")
        inputs, targets = batch("splittable", plan.global_batch, draw.randrange(1000))
        reference = ReferenceEngine(build("splittable"), Loss(function=mse))
        reference.step(inputs, targets)
        describe_with(f"device {world.device_id}, plan {rows}")
        engine = engine_of(world, plan, build("splittable"), inputs, targets, Loss(function=mse))
        if engine is not None:
            step(engine, plan, inputs, targets)
            worst = max(worst, gradients_apart(engine, reference.layers))
        leave(engine)
    return worst


# ---- checkpoints, and states ----

WIDE = ({"cuts": [6, 4], "sizes": [4] * 2, "widths": [2, 1]},)
OTHER = ({"cuts": [3, 7], "sizes": [4] * 2, "widths": [1, 2]},)
NARROW = ({"cuts": [4, 6], "sizes": [4] * 2},)
PLANS = {"wide": WIDE, "other": OTHER, "narrow": NARROW}


def saved_under(world: World, folder: str, first: str, then: str) -> dict[str, Any]:
    """Two steps under a plan, saved; loaded under another: the whole state that both have, one step more under each, and the
    whole state after it."""
    found = dict[str, Any]()
    inputs, targets = batch("splittable", 8, 0)

    def opened(name: str) -> tuple[PlanEngine | None, Plan, Any]:
        plan = make_plan(PLANS[name])
        engine = engine_of(world, plan, build("splittable"), inputs, targets, Loss(function=mse))
        return engine, plan, torch.optim.AdamW(engine.parameters(), lr=0.02) if engine is not None else None

    def finish(engine: PlanEngine, plan: Plan, optimizer: Any, key: str) -> None:
        before = engine.whole_state_dict()
        step(engine, plan, inputs, targets)
        optimizer.step()
        found[key] = before, engine.whole_state_dict(), [*map(float, [engine.grad_norm()])]

    engine, plan, optimizer = opened(first)
    if engine is not None:
        for _ in range(2):
            step(engine, plan, inputs, targets)
            optimizer.step()
        checkpoint.save(folder, 2, engine.stage, optimizer, STATE, engine.world, keep=2)
        finish(engine, plan, optimizer, "saved")
        leave(engine)
    world.barrier()
    engine, plan, optimizer = opened(then)
    if engine is not None:
        path = checkpoint.list_checkpoints(folder)[-1]
        checkpoint.load(Path(path), engine.stage, optimizer, engine.world, whole=engine.layers)
        finish(engine, plan, optimizer, "loaded")
        leave(engine)
    world.barrier()
    return found


# ---- an optimizer, and what cannot be ----


class RowNorms(torch.optim.Optimizer):
    """Scales each gradient by the norm of its row, as LAMB and Adafactor do in other ways."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                parameter -= self.defaults["lr"] * parameter.grad / (1e-3 + parameter.grad.norm())


class ByOptions(RowNorms):
    """Only where a group of parameters asks for it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in (p for p in group["params"] if p.grad is not None):
                    parameter -= 0.1 * parameter.grad / (parameter.grad.norm() if group.get("rows") else 1.0)


class AllTogether(RowNorms):
    """One number for all that it has: halves that one optimizer has would come out as the whole does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        with torch.no_grad():
            for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                parameter -= 0.1 * parameter.grad / norm


def refusals(world: World) -> dict[str, str]:
    """What is said on each rank of a plan with a split stage that cannot be trained so."""
    found = dict[str, str]()
    inputs, targets = batch("splittable", 8, 0)
    plan = make_plan(WIDE)

    def told(name: str, action: Any) -> None:
        try:
            action()
            found[name] = "nothing"
        except InputError as error:
            found[name] = str(error)

    def opened(layers: nn.Sequential) -> PlanEngine:
        engine = engine_of(world, plan, layers, inputs, targets, Loss(function=mse))
        assert engine is not None
        return engine

    for optimizer in (RowNorms, ByOptions, AllTogether, torch.optim.Adafactor, torch.optim.Muon):
        engine = opened(build("splittable"))
        step(engine, plan, inputs, targets)
        takes = [p for p in engine.trained_parameters() if p.ndim == 2]
        groups: Any = [{"params": takes[:1]}, {"params": takes[1:], "rows": True}] if optimizer is ByOptions else takes
        told(optimizer.__name__, optimizer(groups, lr=0.1).step)
        leave(engine)
    layers = build("splittable")
    layers[1].three = nn.Linear(8, 36).double()
    layers[1].tensor_parallel = {"three": "colwise:3/5"}  # type: ignore[assignment]
    told("heads", lambda: opened(layers))
    layers[1].tensor_parallel = {"three": "colwise:4"}  # type: ignore[assignment]
    layers[1].three = nn.Linear(8, 12).double()
    told("parts", lambda: opened(layers))
    layers[1].tensor_parallel = {"four": "colwise"}  # type: ignore[assignment]
    told("no module", lambda: opened(layers))
    layers[1].tensor_parallel = {"norm": "colwise"}  # type: ignore[assignment]
    told("no linear", lambda: opened(layers))
    layers[1].tensor_parallel = {"three": "diagonal"}  # type: ignore[assignment]
    told("no style", lambda: opened(layers))
    told("blocks", lambda: opened(adapt(every_style(), seed=1, r=2, base="nf4")))
    told("rows", lambda: opened(adapt(every_style(96), seed=1, r=2, base="nf4", targets=["keys"])))
    again = build("splittable")
    engine = opened(again)
    step(engine, plan, inputs, targets)
    told("state", engine.state_dict)
    leave(engine)
    with set_aside(again):
        told("again", lambda: opened(again))
    return found
