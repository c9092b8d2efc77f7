"""What ranks run that share layers with adapters, or with matrices in few bits: each layer whole, then split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.origin.base_numbers import numbers_of_base
from hetpipe.checkpoints.training_state import BaseNumbers
from hetpipe.documents.sections.adapter import WEIGHTS_FILE
from hetpipe.hf.adapters.peft_folder import write_adapters
from hetpipe.layers.adapters.adapt import adapter_of
from hetpipe.layers.adapters.quantised import QuantisedLinear
from hetpipe.layers.device import module_bytes, trained_bytes
from hetpipe.layers.model import Loss, Model, cross_entropy, mse, named_layers
from hetpipe.layers.shards.split import Split, split_layer, split_of, whole
from hetpipe.layers.shards.sums import Group
from hetpipe.layers.transforms import tensors_of
from hetpipe.layers.trials.still import Still
from hetpipe.layers.untouched.randomness import drawing
from hetpipe.measuring.profiler import measure_device
from hetpipe.processes.world import World
from tests.support.blocks import WIDTH
from tests.support.jobs import STATE
from tests.support.nets import batch, build
from tests.support.ranks import make_plan
from tests.support.split_programs import LANGUAGE, Row, engine_of, language_model, leave, step

NUMBER_TYPES = (torch.float64, torch.float32, torch.bfloat16)


class Ran(NamedTuple):
    """What a layer gives, and the gradients of its input and of its parameters."""

    output: Tensor
    of_input: Tensor
    of_parameters: dict[str, Tensor]


class Found(NamedTuple):
    """Of a layer: how far it is, split, from itself whole; matrices in few bits whose shards have other bits than the whole ones
    in their place, and how many there are, and those of which a device holds more than its part; what it is not again
    afterwards."""

    apart: float
    unlike: list[str]
    few: int
    large: list[str]
    left: list[str]


def ran(layer: nn.Module) -> Ran:
    """As if every draw came out alike."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(6, WIDTH, generator=draw, dtype=torch.float64).requires_grad_()
    with drawing("here"), Still():
        output = layer(x)
        trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
        of_input, *others = torch.autograd.grad((torch.sin(output) * output).sum(), [x, *trained.values()])
    return Ran(output.detach(), of_input, dict(zip(trained, others, strict=True)))


def matrices(layer: nn.Module) -> dict[str, list[Tensor]]:
    """Those in few bits, in three types."""
    few = {path: module for path, module in layer.named_modules() if isinstance(module, QuantisedLinear)}
    return {path: [module.matrix(dtype) for dtype in NUMBER_TYPES] for path, module in few.items()}


def in_their_place(split: Split, path: str, truth: list[Tensor]) -> list[Tensor]:
    """The part that a device has of a whole matrix."""
    style = split.styles.get(path)
    cut = style.cut(split.group.degree) if style is not None else None
    return truth if cut is None else [cut.shard(each, split.group.number, split.group.degree) for each in truth]


def parts_of(split: Split, path: str) -> int:
    """Over how many devices a matrix is cut."""
    style = split.styles.get(path)
    return 1 if style is None or style.cut(split.group.degree) is None else split.group.degree


def codes_bytes(layer: nn.Module, path: str) -> int:
    """How much memory a matrix's codes keep."""
    return layer.get_buffer(f"{path}.codes").untyped_storage().nbytes()


def apart(layer: nn.Module, split: Split, truth: Ran) -> float:
    """The greatest distance from what is true."""
    own = ran(layer)
    pairs = [(own.output, truth.output), (own.of_input, truth.of_input)]
    for name, gradient in own.of_parameters.items():
        cut = split.layout.cut.get(name)
        wanted = truth.of_parameters[name]
        made = split.group.add_up(gradient) if name in split.layout.partial else gradient
        pairs.append((made, wanted if cut is None else cut.shard(wanted, split.group.number, split.group.degree)))
    return max(float((a - b).abs().max()) for a, b in pairs)


def attributes(layer: nn.Module) -> dict[str, Any]:
    """What a layer's modules are."""
    of = {path: (type(m), sorted(vars(m)), getattr(m, "out_features", 0)) for path, m in layer.named_modules()}
    return {**of, **{f"{name}, its numbers": tensor.detach().clone() for name, tensor in tensors_of(layer).items()}}


def split_and_whole(world: World, nets: Sequence[str]) -> dict[str, list[Found]]:
    """Of each layer of each net that is split, over all ranks."""
    group = Group(world.ranks, world.rank, dist.new_group(world.ranks))
    return {net: _of_net(build(f"splittable, {net}"), group) for net in nets}


def _of_net(layers: nn.Sequential, group: Group) -> list[Found]:
    found = list[Found]()
    for name, layer in named_layers(layers):
        before, truth, few = attributes(layer), ran(layer), matrices(layer)
        bytes_of = {path: layer.get_buffer(f"{path}.codes").nbytes for path in few}
        undo = split_layer(name, layer, group)
        split = split_of(layer)
        if split is None:
            continue
        own, off = matrices(layer), apart(layer, split, truth)
        unlike = [p for p in few if not all(map(torch.equal, own[p], in_their_place(split, p, few[p])))]
        with whole(layer):
            unlike += [f"{p}, put together" for p, made in matrices(layer).items() if not all(map(torch.equal, made, few[p]))]
        large = [path for path in few if codes_bytes(layer, path) != bytes_of[path] // parts_of(split, path)]
        undo()
        after = attributes(layer)
        left = [key for key in before if not (torch.equal(before[key], after[key]) if "," in key else before[key] == after[key])]
        found.append(Found(off, unlike, len(few), large, left))
    return found


# ---- checkpoints ----


class Kept(NamedTuple):
    """What a plan's ranks have after a checkpoint was loaded, or trained: the whole model's state, the bytes of its adapters as
    peft has them, and what the base's numbers are told by."""

    state: dict[str, Tensor]
    exported: bytes
    base: BaseNumbers | None


def language() -> nn.Sequential:
    """Of transformers, over nf4, which two devices can share."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "r": 2, "use_dora": True, "base": "nf4"}
    return language_model("llama", LANGUAGE | sizes)


def from_plan_to_plan(world: World, folder: str) -> list[Kept]:
    """Two steps on widths 2 and 1, saved; loaded on one device and saved; loaded on widths 2 and 1: what each has, on the main
    rank."""
    inputs = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(1))
    loss, found = Loss(function=cross_entropy, weight="tokens"), list[Kept]()
    wide: Row = {"cuts": [2, 2], "sizes": [4] * 2, "widths": [2, 1]}
    for number, row in enumerate((wide, {"cuts": [4], "sizes": [4] * 2}, wide)):
        plan = make_plan([row])
        engine = engine_of(world, plan, language(), inputs[:2], inputs[:2], loss)
        if engine is not None:
            optimizer = torch.optim.AdamW(engine.parameters(), lr=0.02)
            if number:
                path = checkpoint.list_checkpoints(f"{folder}/{number - 1}")[-1]
                checkpoint.load(Path(path), engine.stage, optimizer, engine.world, whole=engine.layers)
            for _ in range(0 if number else 2):
                step(engine, plan, inputs, inputs)
                optimizer.step()
            checkpoint.save(f"{folder}/{number}", 2, engine.stage, optimizer, STATE, engine.world, keep=2)
            base, state = numbers_of_base(engine.layers, engine.world, engine.stage), engine.whole_state_dict()
            if state is not None and engine.world.is_main:
                section = adapter_of(engine.layers)
                assert section is not None
                there = write_adapters(language(), section, state.__getitem__, f"{folder}/peft-{number}")
                found.append(Kept(state, (there / WEIGHTS_FILE).read_bytes(), base))
        leave(engine)
        world.barrier()
    return found


# ---- what is measured ----


def measured_bytes(world: World) -> list[tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]]:
    """Of nets in few bits: bytes of each layer's parameters, of those that train, and of buffers, as they are measured over all
    ranks, and as they are."""
    group, found = Group(world.ranks, world.rank, dist.new_group(world.ranks)), []
    for net in ("splittable, int8", "splittable, nf4, DoRA"):
        layers, (inputs, targets) = build(net, torch.float32), batch(net, 2, 0, torch.float32)
        model = Model(name="test", layers=layers, inputs=inputs, targets=targets, loss=Loss(function=mse))
        own = measure_device(model, "cpu", torch.device("cpu"), [1], torch.optim.SGD, repeats=1, group=group).measurement
        assert own.parameter_bytes is not None
        assert own.trained_bytes is not None
        assert own.buffer_bytes is not None
        for name, layer in named_layers(layers):
            split_layer(name, layer, group)
        measured = zip(own.parameter_bytes, own.trained_bytes, own.buffer_bytes, strict=True)
        held = [
            (parameters, trained_bytes(layer.parameters()), buffers)
            for layer, (parameters, buffers) in zip(layers, map(module_bytes, layers), strict=True)
        ]
        found.append(([*measured], held))
    return found
