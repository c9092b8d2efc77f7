"""Layers that draw (Dropout, noise, sampling) run as if every draw came out alike, so that two runs of them can be compared."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_CHANCE = ("dropout_p", "dropout")  # arguments of operations that draw inside
_INSTEAD = ("native_dropout", "_fused_dropout")  # which do without another way; their argument is p


class Still(TorchDispatchMode):
    """In here what is drawn from torch's generators is the same number everywhere: 1 for a choice, the least for a whole number,
    0.5 for any other; a permutation (also the order of numbers that were drawn) is the one that turns round, and kernels that
    draw inside (of attention, of RNNs) do without. Dropout thus keeps all, times a constant. But draws from a generator whose
    seed is one of `fixed` are what they are."""

    def __init__(self, fixed: Collection[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.exact = True  # that no number had fewer bits than those of float64
        self.seeds = dict[int, bytes]()  # of the generators that were drawn from → their states before
        self._fixed, self._drawn, self._anywhere = fixed, list[Tensor](), False

    @property
    def drew(self) -> bool:
        """Whether anything would have been drawn."""
        return bool(self.seeds) or self._anywhere

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, draws = _kind(func)
        if draws:
            result = self._drawn_result(name, func, list(args), dict(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
            if self._drawn and name in ("sort", "topk") and self._was_drawn(args[0]):
                result = result[0], torch.arange(len(args[0]) - 1, -1, -1, device=result[1].device)[: len(result[1])]
        if self.exact:
            self.exact = not any(_is_rounded(item) for item in (result if isinstance(result, tuple | list) else (result,)))
        return result

    def _drawn_result(self, name: str, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if _never_draws(func, args, kwargs):
            return func(*args, **kwargs)
        if self._is_fixed(args, kwargs):
            return func(*args, **kwargs)
        inside = _without_chance(func, args, kwargs)
        result = func(*args, **kwargs)
        if name in _INSTEAD:
            return args[0].clone(), torch.ones_like(result[1])
        if inside or not isinstance(result, Tensor):
            return result
        if name == "randperm":
            return result.copy_(torch.arange(len(result) - 1, -1, -1, device=result.device))
        if result.ndim == 1:
            self._drawn.append(result)
        return result.fill_(_number(name, args, result))

    def _was_drawn(self, tensor: Tensor) -> bool:
        """Whether these are numbers in a row that were drawn, which are all equal."""
        if not any(tensor.data_ptr() == drawn.data_ptr() and tensor.shape == drawn.shape for drawn in self._drawn):
            return False
        return len(tensor) > 0 and bool((tensor == tensor[0]).all())

    def _is_fixed(self, args: list[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the generator from which will be drawn has a seed that is always the same; notes its state."""
        generator = _generator(args, kwargs)
        if generator is None:
            self._anywhere = True
            return False
        seed = generator.initial_seed()
        if seed not in self.seeds:
            self.seeds[seed] = generator.get_state().numpy().tobytes()
        return seed in self._fixed


class Quiet:
    """A stand-in for Still where nothing is expected to be drawn, and operations then cost nothing more: `drew` says whether
    torch's own generators were drawn from all the same."""

    def __init__(self) -> None:
        self.exact, self.drew = True, False  # it looks at no number; ask it only of what is rounded already
        self._before = list[Tensor]()

    def __enter__(self) -> Quiet:
        self._before = _states()
        return self

    def __exit__(self, *_: object) -> None:
        self.drew |= not all(map(torch.equal, self._before, _states()))


def _states() -> list[Tensor]:
    """Return the states of torch's generators on the CPU and, where CUDA is in use, on the current GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


@cache
def _kind(func: Any) -> tuple[str, bool]:
    """The name of an operation, without its namespace, and whether it may draw."""
    name = func._schema.name.partition("::")[2].rstrip("_")
    return name, torch.Tag.nondeterministic_seeded in func.tags or name == "random"


def _is_rounded(value: object) -> bool:
    """Whether it has numbers of fewer bits than those of float64."""
    if not isinstance(value, Tensor):
        return False
    return (value.is_floating_point() and value.dtype != torch.float64) or value.dtype in (torch.complex64, torch.complex32)


def fixed_seeds(first: Still, second: Still) -> set[int]:
    """The seeds that a function sets itself: those from which it drew the same in two runs, before which others were set."""
    return {seed for seed, state in first.seeds.items() if second.seeds.get(seed) == state}


def _generator(args: list[Any], kwargs: dict[str, Any]) -> torch.Generator | None:
    """From which an operation draws: that which it is given, or its device's; None where it is not known."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return value
    device = next((value.device for value in args if isinstance(value, Tensor)), kwargs.get("device") or torch.device("cpu"))
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator if device.type == "cpu" else None


def _never_draws(func: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the operation draws inside for chances that are all zero here, as attention without dropout has them."""
    names = ("p",) if _kind(func)[0] in _INSTEAD else _CHANCE
    places = [(place, argument) for place, argument in enumerate(func._schema.arguments) if argument.name in names]
    given = [args[at] if at < len(args) else kwargs.get(a.name, a.default_value) for at, a in places]
    return bool(given) and all(type(chance) in (int, float) and chance == 0 for chance in given)


def _without_chance(func: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the operation draws inside, which these arguments then keep it from."""
    found = False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in _CHANCE:
            found = True
            if place < len(args):
                args[place] = 0.0
            elif argument.name in kwargs:
                kwargs[argument.name] = 0.0
    if func._schema.name.startswith("aten::rrelu"):  # (input, noise, lower, upper, …)
        found, args[2:4] = True, [sum(args[2:4]) / 2] * 2
    return found


def _number(name: str, args: list[Any], result: Tensor) -> float:
    """What a draw comes out as."""
    if name == "bernoulli":
        return 1.0
    if name in ("randint", "randint_like", "random"):
        return float(args[name != "randint"]) if len(args) > 2 else 0.0  # (low, high, size), (tensor, low, high): else from 0 on
    return 0.5 if result.is_floating_point() or result.is_complex() else 0.0
