"""What layers compute and keep, counted without values, beside what a real run of them has."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hetpipe.building.build import build_data, build_model
from hetpipe.documents.job import Job
from hetpipe.documents.number_types import NumberTypes
from hetpipe.layers.device import module_bytes, trained_bytes
from hetpipe.layers.model import Model
from hetpipe.layers.weights import materialise
from hetpipe.measuring.precision.counted import counted
from hetpipe.measuring.precision.layer_bytes import boundary_bytes, saved_bytes
from tests.support.commands import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch says which kernels it does not use
CPU = torch.device("cpu")
SMALL = ("flux.1-dev-lora-laptop", "qwen-image-lora-laptop", "wan2.2-lora-laptop")


def built(name: str, base: str | None = "fp8") -> Model:
    """`base`: of adapters; without one all of it trains."""
    changed = f"adapter.base={base}" if base is not None else "adapter=null"
    job = Job.read(ROOT / "configs" / "recipes" / f"{name}.yaml", [changed, "train.precision=bf16"])
    return build_model(job, build_data(job))


BASES = ("fp8", "bf16", None)
FIRST = set(zip(SMALL, BASES, strict=True))  # each model and each base once; `make test-all` has all pairs


@pytest.mark.parametrize(
    ("name", "base"),
    [pytest.param(*pair, marks=() if pair in FIRST else pytest.mark.thorough) for pair in itertools.product(SMALL, BASES)],
)
def test_counted_bytes_are_those_of_a_run_or_a_few_more(name: str, base: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    model = built(name, base)
    found = counted(model, "here", "samples")
    for precision in ("fp32", "bf16"):
        types, own = NumberTypes.of("float32", precision), found.layers[precision]
        ends = boundary_bytes(model, CPU, types)
        run = saved_bytes(model, CPU, types)
        assert [one.output for one in own] == ends[1:]
        assert found.input_bytes == ends[0]
        assert [one.cast for one in own] == run.cast
        within(run.first, [one.first_saved for one in own])
    for one, layer in zip(found.layers["bf16"], model.layers, strict=True):
        assert (one.parameters, one.buffers) == module_bytes(layer)
        assert one.trained == trained_bytes(layer.parameters())


def within(run: list[int], own: list[int]) -> None:
    """A block whose results are not all used saves less than others of its kind."""
    assert all(a <= b for a, b in zip(run, own, strict=True))
    assert sum(own) < 1.05 * sum(run)


class Products(TorchFunctionMode):
    """Adds up the FLOPs of matrix products by their formula."""

    flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            self.flops += 2 * args[0].numel() * len(args[1])
        if func is nn.functional.scaled_dot_product_attention:
            q, k, v = args[:3] if args else (kwargs[name] for name in ("query", "key", "value"))
            self.flops += 2 * q.numel() * k.shape[-2] + 2 * q[..., 0].numel() * v.shape[-2] * v.shape[-1]
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", ["flux.1-dev-lora-laptop", "wan2.2-lora-laptop"])
def test_counted_operations_are_those_of_the_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    model = built(name, "as-is")
    found = counted(model, "here", "samples").layers["fp32"]
    materialise(model.layers)
    given: Any = model.sample(1)[0]
    blocks = found[1:-1]
    for number, layer in enumerate(model.layers):
        with Products() as products, torch.no_grad():
            given = layer(given)
        if found[number] in blocks:  # before them are convolutions
            assert found[number].forward == pytest.approx(products.flops, rel=1e-6)
    assert all(one.forward < one.backward < 1.5 * one.forward for one in blocks), "no gradients of what is frozen"
    assert found[0].backward < found[0].forward, "nothing before the first adapters"
