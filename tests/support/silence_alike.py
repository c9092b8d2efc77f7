"""More of what the ranks of tests/test_silence.py run: a model that ranks have trained in part, and what must be alike on all."""

from __future__ import annotations

from typing import Any

import torch

import hetpipe
from hetpipe.documents.plan import Plan
from hetpipe.layers.model import as_tuple, cross_entropy, mse
from hetpipe.processes.world import World
from hetpipe.runtime.plan_engine import PlanEngine
from tests.support.nets import batch, build
from tests.support.ranks import cluster_of, make_plan
from tests.support.silence import PLAN, add_up, change, couple, draw, lose, opened, parts, predict, told, unlike


def edit(world: World) -> dict[str, Any]:
    """A weight is edited on one rank."""
    heard: dict[str, Any] = {}
    engine = opened(world, build("blocks"))
    engine.check_replicas_every = 2
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    for step in range(4):
        if step == 1 and world.rank == 2:
            with torch.no_grad():
                next(engine.parameters()).view(-1)[0] += 1e-6
        heard[f"edited, step {step}"] = told(lambda step=step: engine.step(*parts(engine, "blocks", step)))  # type: ignore[misc]
        if heard[f"edited, step {step}"] is not None:
            break
        optimizer.step()
    heard["edited, saved"] = told(lambda: hetpipe.save_checkpoint(engine, optimizer, "nowhere", 3))
    heard["edited, whole"] = told(engine.whole_state_dict)
    engine.close()
    return heard


OTHER = make_plan([{"cuts": [4, 6], "sizes": [3, 2]}, {"cuts": [10], "sizes": [2, 1]}])


def rewrap(_: World) -> dict[str, Any]:
    """A model that was trained by one plan is called, saved, and trained on by another."""
    heard: dict[str, Any] = {"losses": []}
    net, inputs = build("blocks"), as_tuple(batch("blocks", 4, 0)[0])[0]

    def wrapped(plan: Plan) -> PlanEngine:
        return hetpipe.wrap(net, plan, inputs, mse, cluster=cluster_of(2, 1))

    def train(engine: PlanEngine) -> PlanEngine:
        optimizer = torch.optim.SGD(engine.parameters(), lr=0.5)
        heard["losses"].append(engine.step(*parts(engine, "blocks", len(heard["losses"]))))
        optimizer.step()
        return engine

    engine = train(wrapped(PLAN))
    heard["called"], heard["state"] = told(lambda: net(inputs)), told(net.state_dict)
    engine.close()
    net.requires_grad_(False).requires_grad_(True)
    heard["called, closed"], heard["other plan"] = told(lambda: net(inputs)), told(lambda: wrapped(OTHER))
    engine = train(wrapped(PLAN))
    heard["called, again"] = told(lambda: net(inputs))
    net.load_state_dict(engine.world.first(engine.whole_state_dict()))
    heard["output"] = net(inputs).detach()
    engine.close()
    heard["hooks"] = len(net._forward_pre_hooks) + len(net._state_dict_pre_hooks)
    engine = train(wrapped(OTHER))
    heard["trained"] = engine.whole_state_dict()
    engine.close()
    return heard


def differ(world: World) -> dict[str, Any]:
    """`wrap` is given other arguments on rank 2; a replica is in another mode."""
    net, inputs = build("blocks"), as_tuple(batch("blocks", 4, 0)[0])[0]
    odd = world.rank == 2
    heard: dict[str, Any] = {
        "wrapped": told(
            lambda: hetpipe.wrap(
                net.train(not odd),
                PLAN,
                inputs,
                cross_entropy if odd else mse,
                loss_weight="tokens" if odd else "samples",
                coupled_layers="per_microbatch" if odd else None,
                seed=7,
                cluster=cluster_of(2, 1),
            )
        )
    }
    engine = opened(world, net.train())
    whole = [as_tuple(x)[0] for x in batch("blocks", 8, 0)]
    turned = torch.arange(8).roll(1 if odd else 0)
    for what, order in {"same batch": torch.arange(8), "other batch": turned}.items():
        given = [engine.share(x[order]) for x in whole]
        heard[what] = told(lambda given=given: engine.step(*given))  # type: ignore[misc]
        heard[f"{what} in an evaluation"] = told(lambda given=given: engine.evaluate(*given))  # type: ignore[misc]
    heard["not shared"] = told(lambda: engine.step(*parts(engine, "blocks", world.rank // 2)))
    net[7].linear.train(not odd)  # type: ignore[union-attr]
    heard["modes"] = told(lambda: engine.step(*parts(engine, "blocks", 0)))
    engine.close()
    return heard


def everything(world: World) -> dict[str, Any]:
    """All of it, in one start of ranks."""
    every = {
        "draw": draw,
        "add up": add_up,
        "change": change,
        "edit": edit,
        "unlike": unlike,
        "lose": lose,
        "couple": couple,
        "predict": predict,
        "rewrap": rewrap,
        "differ": differ,
    }
    return {name: part(world) for name, part in every.items()}
