"""What modules keep is put back (hetpipe/layers/untouched/kept.py), whatever the classes of what they keep it in."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetpipe.layers.untouched.boundaries import trace_boundaries
from hetpipe.layers.untouched.kept import kept


def refuse(*_: Any, **__: Any) -> Any:
    raise TypeError("it may not be written, and is not to be asked for a copy")


class FrozenDict(OrderedDict[str, Any]):
    """As a library has it for configurations: what it holds are its attributes, too, and nothing writes either."""

    def __init__(self, **items: Any) -> None:
        for key, value in items.items():
            OrderedDict.__setitem__(self, key, value)
            vars(self)[key] = value

    __setattr__ = __setitem__ = __delitem__ = setdefault = pop = popitem = clear = update = move_to_end = copy = refuse


class Plainer(dict[str, Any]):
    """Whose methods mean something else."""

    keys = values = items = __iter__ = __len__ = refuse
    copy = clear = update = __setitem__ = __delitem__ = __contains__ = __getitem__ = refuse


class Fixed(list[Any]):
    __iter__ = __len__ = __setitem__ = __getitem__ = copy = clear = extend = append = refuse


class FixedSet(set[Any]):
    __iter__ = __len__ = copy = clear = update = add = discard = difference_update = refuse


class FixedDeque(deque[Any]):
    __iter__ = __len__ = copy = clear = extend = append = popleft = refuse


class Both(dict[str, Any]):
    """Its items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class View(Mapping[str, Any]):
    """A mapping that is no dict, and cannot be written."""

    def __init__(self, **items: Any) -> None:
        object.__setattr__(self, "_items", items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[attr-defined]

    __setattr__ = refuse


def added(held: Any) -> None:
    dict.__setitem__(held, "c", 3)


def moved(held: Any) -> None:
    OrderedDict.move_to_end(held, "a")
    OrderedDict.__delitem__(held, "b")
    OrderedDict.__setitem__(held, "b", 5)


def emptied(held: Any) -> None:
    (OrderedDict if isinstance(held, OrderedDict) else dict).clear(held)


def again(held: Any) -> None:
    """The same keys and values in another order."""
    value = dict.pop(held, "a")
    dict.__setitem__(held, "a", value)


def replaced(held: Any) -> None:
    OrderedDict.__setitem__(held, "a", 7)
    vars(held)["a"] = 7


CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {  # what a layer holds, and what its forward does to it
    "frozen": (lambda: FrozenDict(a=1, b=2), lambda _: None),
    "frozen, replaced": (lambda: FrozenDict(a=1, b=2), replaced),
    "frozen, emptied": (lambda: FrozenDict(a=1, b=2), emptied),
    "frozen, moved": (lambda: FrozenDict(a=1, b=2, c=3), moved),
    "ordered, moved": (lambda: OrderedDict(a=1, b=2, c=3), moved),
    "a dict": (lambda: {"a": 1, "b": 2}, added),
    "a dict in another order": (lambda: {"a": 1, "b": 2}, again),
    "a dict, emptied": (lambda: {"a": 1, "b": 2}, emptied),
    "of other methods": (lambda: Plainer(a=1, b=2), lambda _: None),
    "of other methods, changed": (lambda: Plainer(a=1, b=2), added),
    "items as attributes": (lambda: Both(a=1, b=2), lambda held: setattr(held, "a", 5)),
    "with a default": (lambda: defaultdict(list, a=[1]), lambda held: held["b"].append(2)),
    "with a default that fails": (lambda: defaultdict(refuse, a=1), added),
    "counted": (lambda: Counter("aab"), lambda held: held.update("bcc")),
    "a list": (lambda: [1, 2], lambda held: held.insert(0, 3)),
    "a list, replaced": (lambda: [1, 2], lambda held: held.reverse()),
    "a fixed list": (lambda: Fixed([1, 2]), lambda held: list.append(held, 3)),
    "a set": (lambda: {1, 2}, lambda held: held.symmetric_difference_update([1, 3])),
    "a fixed set": (lambda: FixedSet([1, 2]), lambda held: set.clear(held)),
    "a deque": (lambda: deque([1, 2]), lambda held: held.append(3)),
    "a full deque": (lambda: deque([1, 2, 3], maxlen=3), lambda held: held.extend([4, 5])),
    "a deque with room": (lambda: deque([1, 2], maxlen=4), lambda held: held.extend([3, 4, 5])),
    "a deque, emptied": (lambda: deque([1, 2], maxlen=4), lambda held: held.clear()),
    "a fixed deque": (lambda: FixedDeque([1, 2], maxlen=2), lambda held: deque.append(held, 3)),
    "a view": (lambda: View(a=1, b=2), lambda held: held._items.pop("a")),
    "a proxy": (lambda: MappingProxyType({"a": 1}), lambda _: None),
}


def content(held: Any) -> Any:
    """All of a container, in its order, whatever its own methods say."""
    kinds: tuple[Any, ...] = (OrderedDict, dict, list, set, deque)
    for kind in kinds:
        if issubclass(type(held), kind):
            own = getattr(held, "__dict__", held)
            return list((kind.items if issubclass(kind, dict) else kind.__iter__)(held)), None if own is held else dict(own)
    return list(held.items())


class Holds(nn.Module):
    """Its forward does something to what it holds; nobody sets its attributes."""

    held: Any
    change: Any

    def __init__(self, held: Any, change: Callable[[Any], Any]) -> None:
        super().__init__()
        vars(self).update(held=held, inside=[(), {"deep": held}], change=change)

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.held)
        return x * 2

    __setattr__ = refuse


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_of_any_class_are_put_back(name: str) -> None:
    """One that may not be written crashed the look at its layer, and was left empty: it was cleared before it refused."""
    make, change = CONTAINERS[name]
    layer, wanted = Holds(make(), change), content(make())
    held = layer.held
    for _ in range(2):
        with kept(layer):
            layer(torch.ones(2))
        assert layer.held is held
        assert content(held) == wanted
    trace_boundaries(nn.Sequential(nn.Linear(2, 2), layer), torch.ones(3, 2), backward=True)
    assert content(held) == wanted


@pytest.mark.parametrize("held", [OrderedDict(a=1, b=2), deque([1, 2])])
def test_what_did_not_change_is_not_written(held: Any) -> None:
    layer = nn.Linear(2, 2)
    layer.held = held
    reader = iter(held)
    next(reader)
    with kept(layer):
        layer(torch.ones(2))
    next(reader)  # which fails after a write


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2])
def test_numbers_of_few_bits_are_put_back(dtype: torch.dtype) -> None:
    """torch compares none of them where one is no number."""
    layer, bits = nn.Linear(2, 2), torch.tensor([1, 255, 127, 3], dtype=torch.uint8)
    layer.register_buffer("few", bits.clone().view(dtype))
    for _ in range(2):
        with kept(layer):
            layer.get_buffer("few").view(torch.uint8)[0] += 1
        assert torch.equal(layer.get_buffer("few").view(torch.uint8), bits)


def test_modules_are_put_back_where_they_were_registered() -> None:
    """By whose order parameters are numbered, and layers called."""
    net = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.ReLU(), c=nn.Linear(2, 3)))
    first, names = net.get_submodule("a"), [name for name, _ in net.named_parameters()]
    with kept(net):
        del net.a
        net.add_module("d", nn.Tanh())
        net.add_module("a", first)
        net.get_submodule("c").register_parameter("bias", None)
        net.get_submodule("c").register_parameter("gain", nn.Parameter(torch.ones(1)))
        net.get_submodule("b").register_forward_hook(lambda *_: None)
    assert [name for name, _ in net.named_children()] == ["a", "b", "c"]
    assert [name for name, _ in net.named_parameters()] == names
    assert net.get_submodule("a") is first
    assert not net.get_submodule("b")._forward_hooks
