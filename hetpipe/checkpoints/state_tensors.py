"""The tensors of a model and its optimizer under the whole model's names, as checkpoints hold them; and whether those of a
checkpoint are of the same model and the same kind of optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from hetpipe.checkpoints.stores.layout import Described
from hetpipe.layers.numbers import type_name
from hetpipe.layers.shards.split import Piece, pieces_in
from hetpipe.layers.transforms import written_names
from hetpipe.layers.weights import state_of

MODEL, OPTIMIZER = "model.", "optimizer."  # what the keys of a checkpoint begin with
UNKNOWN = ("float8_e8m0fnu", "float4_e2m1fn_x2")  # types of one byte that safetensors writes, and torch does not read back
SMALL = 2  # in each dimension of a parameter that shows what an optimizer keeps
StateKeys = Callable[[nn.Parameter], dict[str, Tensor]]  # what an optimizer keeps of such a parameter
Kept = Callable[[str, Tensor], Tensor]  # gets a tensor under its key, and gives the one that is kept


def _names(stage: nn.Module) -> dict[nn.Parameter, list[str]]:
    names, written = dict[nn.Parameter, list[str]](), written_names(stage)
    for name, parameter in stage.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(written(name))
    return names


def model_state(stage: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by their names in the whole model; a tied parameter under each of its names."""
    return {f"{MODEL}{name}": saved_view(tensor.detach()) for name, tensor in state_of(stage).items()}


def saved_view(tensor: Tensor) -> Tensor:
    """The same memory, in a type that files of tensors can be read back in."""
    return tensor.view(torch.uint8) if type_name(tensor.dtype) in UNKNOWN else tensor


def optimizer_state(stage: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer tensors as `optimizer.<parameter name>.<key>`."""
    names, found = _names(stage), dict[str, Tensor]()
    for parameter, values in optimizer.state.items():
        assert isinstance(parameter, nn.Parameter)
        for key, value in values.items():
            if value is None:  # SGD without momentum keeps an empty place
                continue
            tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            found |= {f"{OPTIMIZER}{name}.{key}": tensor.detach() for name in names.get(parameter, [])}
    return found


class Shards:
    """The tensors of a stage's state that are shards here, and whole in files. `state` has those of this rank, by their keys."""

    def __init__(self, stage: nn.Module) -> None:
        written = written_names(stage)
        self._of = {written(name): piece for name, piece in pieces_in(stage).items()}
        named = dict(stage.named_parameters(remove_duplicate=False)) | dict(stage.named_buffers(remove_duplicate=False))
        self._shapes = {written(name): tuple(named[name].shape) for name in pieces_in(stage)}

    def piece(self, key: str, shape: Sequence[int]) -> Piece | None:
        """What this tensor, which has this shape here, is a shard of; None if it is whole."""
        name = key.removeprefix(MODEL) if key.startswith(MODEL) else key.removeprefix(OPTIMIZER).rpartition(".")[0]
        return self._of.get(name) if self._shapes.get(name) == tuple(shape) else None

    def shapes(self, state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole tensors."""
        pieces = [(key, tuple(tensor.shape), self.piece(key, tensor.shape)) for key, tensor in state.items()]
        return {key: shape if piece is None else piece.whole_shape(shape) for key, shape, piece in pieces}

    def whole(self, state: Mapping[str, Tensor], wanted: Collection[str], take: Kept | None = None) -> dict[str, Tensor]:
        """Return the `wanted` tensors whole, as `take` gives them; without it, those that are put together are on the CPU, and
        the others as they are. Collective over the devices of a split stage, which may want others."""
        found = dict[str, Tensor]()
        for key in sorted(state):
            piece = self.piece(key, state[key].shape)
            tensor = state[key] if piece is None else piece.joined(state[key])
            if key in wanted:
                found[key] = take(key, tensor) if take is not None else tensor if piece is None else tensor.cpu()
        return found

    def room(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what a file is read into: these tensors, and for each shard an empty whole tensor on the CPU."""
        shapes = self.shapes(state)
        return {
            key: tensor if shapes[key] == tuple(tensor.shape) else torch.empty(shapes[key], dtype=tensor.dtype)
            for key, tensor in state.items()
        }

    def take(self, state: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> None:
        """Fill the shards of the state with their part of what was loaded into their room."""
        for key, tensor in state.items():
            piece = self.piece(key, tensor.shape)
            if piece is not None:
                tensor.copy_(piece.shard(loaded[key]))


def shares(sizes: Sequence[Mapping[str, int]]) -> list[list[str]]:
    """Return which tensors each rank writes, where `sizes` has the bytes of those that each rank holds. Of the ranks that hold a
    tensor, the one that has least to write until then writes it."""
    holders = dict[str, list[int]]()
    for rank, own in enumerate(sizes):
        for key in own:
            holders.setdefault(key, []).append(rank)
    found, so_far = [list[str]() for _ in sizes], [0] * len(sizes)
    for key, ranks in holders.items():
        rank = min(ranks, key=lambda rank: so_far[rank])
        found[rank].append(key)
        so_far[rank] += sizes[rank][key] or 1
    return found


def model_faults(available: Mapping[str, Described], layers: nn.Module, *, surplus: bool) -> list[str]:
    """Where the tensors of these layers are others than those that were saved."""
    faults, own = [], model_state(layers)
    shapes = Shards(layers).shapes(own)
    for key, tensor in own.items():
        name, there = repr(key.removeprefix(MODEL)), available.get(key)
        if there is None:
            faults.append(f"it has no {name}, which the model has")
        elif there.shape != shapes[key]:
            faults.append(f"{name} has shape {there.shape}, in the model {shapes[key]}")
        elif there.dtype != tensor.dtype:
            faults.append(f"{name} is {_kind(there.dtype)}, in the model {_kind(tensor.dtype)} (train.dtype)")
    if surplus:
        more = sorted(key for key in available if key.startswith(MODEL) and key not in own)
        faults += [f"it has {key.removeprefix('model.')!r}, which the model has not" for key in more]
    return faults


def optimizer_faults(
    stage: nn.Module, optimizer: torch.optim.Optimizer, available: Mapping[str, Described], keeps: StateKeys
) -> list[str]:
    """Where what was saved of a parameter is not what this optimizer keeps of it."""
    trained, saved, faults = {p for g in optimizer.param_groups for p in g["params"]}, _saved_state(available), list[str]()
    split = Shards(stage)
    for parameter, names in _names(stage).items():
        there = saved.get(names[0], {})
        if parameter not in trained or not there:
            continue
        own, piece = keeps(parameter), split.piece(f"{MODEL}{names[0]}", parameter.shape)
        of_parameter = tuple(parameter.shape) if piece is None else piece.whole_shape(parameter.shape)
        if there.keys() != own.keys():
            kept = ", ".join(sorted(own)) or "nothing"
            faults.append(f"of {names[0]!r} it has {', '.join(sorted(there))}; the job's optimizer keeps {kept}")
            continue
        for key, like in own.items():
            found, dtype = there[key].shape, there[key].dtype
            whole = like.ndim > 0 and tuple(like.shape) == (SMALL,) * parameter.ndim
            if (whole and found != of_parameter) or len(found) != like.ndim or (whole and dtype != like.dtype):
                faults.append(
                    f"{key} of {names[0]!r} is {_kind(dtype)} {found}, the parameter {_kind(like.dtype)} {of_parameter}"
                )
    return faults


def _saved_state(available: Mapping[str, Described]) -> dict[str, dict[str, Described]]:
    """Parameter name → key → what is known of the tensor."""
    found: dict[str, dict[str, Described]] = {}
    for key, meta in available.items():
        if key.startswith(OPTIMIZER):
            name, _, kept = key.removeprefix(OPTIMIZER).rpartition(".")
            found.setdefault(name, {})[kept] = meta
    return found


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def state_keys(factory: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]) -> StateKeys:
    """What the optimizer keeps of a parameter, from a step of a small one of its kind."""
    known: dict[tuple[int, torch.dtype, torch.device], dict[str, Tensor]] = {}

    def keeps(parameter: nn.Parameter) -> dict[str, Tensor]:
        kind = parameter.ndim, parameter.dtype, parameter.device
        if kind not in known:
            small = nn.Parameter(torch.zeros((SMALL,) * parameter.ndim, dtype=parameter.dtype, device=parameter.device))
            small.grad = torch.zeros_like(small)
            optimizer = factory([small])
            optimizer.step()
            known[kind] = {
                key: value if isinstance(value, Tensor) else torch.tensor(value)
                for key, value in optimizer.state[small].items()
                if value is not None
            }
        return known[kind]

    return keeps


def empty_optimizer_state(
    stage: nn.Module, optimizer: torch.optim.Optimizer, available: Mapping[str, Described]
) -> dict[str, Tensor]:
    """Room for what a checkpoint has, which is whole, of the parameters that this optimizer trains."""
    groups, split = optimizer.param_groups, Shards(stage)
    trained = {p for group in groups for p in group["params"]}
    counted_there = {p for group in groups if group.get("fused") or group.get("capturable") for p in group["params"]}
    wanted = {}
    for parameter, names in _names(stage).items():
        prefix, is_shard = f"{OPTIMIZER}{names[0]}.", split.piece(f"{MODEL}{names[0]}", parameter.shape) is not None
        for key, meta in available.items():
            if parameter in trained and key.startswith(prefix) and "." not in key[len(prefix) :]:
                on_device = parameter in counted_there if not len(meta.shape) else not is_shard  # `install` cuts and moves those
                wanted[key] = torch.empty(meta.shape, dtype=meta.dtype, device=parameter.device if on_device else "cpu")
    return wanted


def install(stage: nn.Module, optimizer: torch.optim.Optimizer, loaded: dict[str, Tensor]) -> None:
    """Give the optimizer what was loaded of its parameters."""
    split = Shards(stage)
    for parameter, names in _names(stage).items():
        prefix = f"{OPTIMIZER}{names[0]}."
        values = {key[len(prefix) :]: value for key, value in loaded.items() if key.startswith(prefix)}
        piece = split.piece(f"{MODEL}{names[0]}", parameter.shape)
        if piece is not None:
            whole = piece.whole_shape(parameter.shape)
            values = {k: piece.shard(v).to(parameter.device) if tuple(v.shape) == whole else v for k, v in values.items()}
        if values:
            optimizer.state[parameter] = dict(values)
