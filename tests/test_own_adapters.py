"""Adapters of chains of one's own: as folders of peft, for the chain or for the model of a library that its layers are of, and
back."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetpipe
from hetpipe import adapt
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.origin.base import adapter_keys, adapter_names, base_of
from hetpipe.files.messages import InputError
from hetpipe.hf.adapters.patterns import modules_to_save, target_modules
from hetpipe.layers.model import mse, named_layers
from hetpipe.layers.transforms import uncompiled
from hetpipe.layers.weights import state_of
from hetpipe.processes.world import alone
from tests.support.adapted import trained_a_little
from tests.support.commands import Command
from tests.support.peft_folders import with_peft
from tests.support.ranks import make_plan

WIDTH, X = 8, torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """With modules in a row, whose names are numbers, as those of the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.net(self.norm(x))
        return out


def chain(layers: int = 11) -> nn.Sequential:
    torch.manual_seed(0)
    inner = [Block() for _ in range(layers)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *inner, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)).double()


def twice() -> nn.Sequential:
    torch.manual_seed(0)
    block = Block()
    return nn.Sequential(block, nn.ReLU(), block, nn.Linear(WIDTH, 4)).double()


def compiled() -> nn.Sequential:
    layers = chain(2)
    layers[1] = torch.compile(layers[1], backend="eager")  # type: ignore[assignment]
    return layers


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    layers = OrderedDict(first=nn.Linear(WIDTH, WIDTH), norm=nn.BatchNorm1d(WIDTH), last=nn.Linear(WIDTH, 4))
    return nn.Sequential(layers).double()


def output(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(X)
    return found


def saved_by_a_loop(folder: Path, layers: nn.Sequential) -> Path:
    """As `save_checkpoint` leaves it."""
    extra = {"base": base_of(layers), "adapter": adapter_keys(layers), "adapter_names": adapter_names(layers)}
    return checkpoint.save(folder, 1, layers, torch.optim.SGD(layers.parameters()), extra, alone(), keep=1)


CASES: dict[str, tuple[Callable[[], nn.Sequential], dict[str, Any]]] = {
    "all linear": (chain, {}),
    "DoRA": (chain, {"use_dora": True}),
    "rsLoRA": (chain, {"rank_stabilized": True, "alpha": 3}),
    "norms too": (chain, {"train_also": ["norms"]}),
    "norms and head too": (chain, {"train_also": ["norms", "head"]}),
    "a name that ends another": (chain, {"targets": ["0", "3.net.0"]}),
    "the head": (chain, {"targets": ["net.2", "13"]}),
    "a layer at two places": (twice, {"train_also": ["norms"]}),
    "a compiled layer": (compiled, {"train_also": ["norms"]}),
    "statistics": (normalised, {"train_also": ["norms"]}),
}


def test_peft_loads_them_into_the_chain_itself_and_they_go_on(tmp_path: Path) -> None:
    """With the model at hand, and by what the checkpoint says alone."""
    misses = {}
    for name, (make, options) in CASES.items():
        layers = trained_a_little(adapt(make(), seed=3, r=2, **options)).eval()
        saved, found = saved_by_a_loop(tmp_path / name / "saved", layers), []
        for model in (adapt(make(), seed=4, r=2, **options), None):
            folder = hetpipe.export_weights(model, tmp_path / name / "saved", tmp_path / name / str(model is None))
            plain = nn.Sequential(OrderedDict((label, uncompiled(layer)) for label, layer in named_layers(make())))
            again = adapt(make(), weights=str(folder)).eval()
            found += [output(with_peft(plain, folder)), output(again)]
            own, section = adapter_keys(layers), adapter_keys(again)
            assert own is not None
            assert section is not None
            assert section | {"targets": own["targets"]} == own | {"train_also": sorted(own["train_also"])}
            assert state_of(again).keys() == state_of(layers).keys()
        again = adapt(make(), seed=4, r=2, **options)
        hetpipe.load_weights(again, saved)
        found.append(output(again))
        off = max(float((each - output(layers)).abs().max()) for each in found)
        if not off < 1e-10 or not (output(make()) - output(layers)).abs().max() > 1e-3:
            misses[name] = off
    assert not misses


@pytest.mark.parametrize("bits", ["fp8", "int8", "nf4"])
def test_over_few_bits_they_are_those_that_were_trained(bits: str, tmp_path: Path) -> None:
    layers = trained_a_little(adapt(chain(2), seed=3, r=2, base=bits, use_dora=True))
    saved_by_a_loop(tmp_path / "saved", layers)
    folder = hetpipe.export_weights(adapt(chain(2), seed=4, r=2, base=bits, use_dora=True), tmp_path / "saved", tmp_path / "out")
    again = adapt(chain(2), weights=str(folder), base=bits)
    assert all(torch.equal(a, b) for a, b in zip(state_of(again).values(), state_of(layers).values(), strict=True))
    assert torch.equal(again.eval()(X), layers.eval()(X))
    assert len([name for name, _ in with_peft(chain(2), folder).named_parameters() if ".lora_" in name]) == len(state_of(layers))


def test_what_peft_would_put_at_one_place_only_is_refused(tmp_path: Path) -> None:
    def one() -> nn.Sequential:
        torch.manual_seed(0)
        layer = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(WIDTH, 4))

    saved_by_a_loop(tmp_path / "saved", adapt(one(), seed=3, r=2))
    with pytest.raises(InputError, match="layer '0' is a Linear at several places of the chain, of which peft adds to one only"):
        hetpipe.export_weights(adapt(one(), seed=3, r=2), tmp_path / "saved", tmp_path / "out")
    with pytest.raises(InputError, match="does not say what its adapters are called outside of the model that was trained"):
        hetpipe.export_weights(None, tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Library(nn.Module):
    """A model as a library has it, which is no chain."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.start, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(blocks))
        self.scale, self.end = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.end(x * self.scale)
        return out


class Wrapped(nn.Module):
    """A layer that holds one of its blocks."""

    def __init__(self, model: Library, number: int) -> None:
        super().__init__()
        self.inner = model.blocks[number]
        self.library_names = hetpipe.library_names(self, model)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class Last(nn.Module):
    def __init__(self, model: Library) -> None:
        super().__init__()
        self.scale, self.out = model.scale, model.end
        self.library_names = {"scale": "scale", "out.weight": "end.weight", "out.bias": "end.bias"}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(x * self.scale)
        return out


def library_chain() -> nn.Sequential:
    model = Library().double()
    first: Any = model.start
    first.library_names = hetpipe.library_names(first, model)
    return nn.Sequential(first, *[Wrapped(model, number) for number in range(3)], Last(model))


def test_a_layer_says_what_a_library_calls_its_tensors() -> None:
    layers: Any = library_chain()
    assert layers[0].library_names == {"weight": "start.weight", "bias": "start.bias"}
    assert layers[2].library_names["inner.net.0.weight"] == "blocks.1.net.0.weight"
    assert hetpipe.library_names(layers[4], layers[4]) == {name: name for name, _ in layers[4].named_parameters()}
    wrong = library_chain()
    wrong[1].library_names = ["inner"]  # type: ignore[assignment]
    with pytest.raises(InputError, match="layer '1': library_names is a list, and must be a mapping from the names of its"):
        adapt(wrong, targets=["end"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True, "train_also": ["norms", "head"]},
        {"targets": ["blocks.1.net.0", "start"]},
        {"targets": ["2.inner.net.0", "end"]},
    ],
)
def test_they_are_handed_on_under_the_names_of_the_library(options: dict[str, Any], tmp_path: Path, run: Command) -> None:
    """A loop of one's own, its checkpoint, and the library's own model with what comes of it; and back."""
    layers = adapt(library_chain(), seed=3, r=2, **options)
    engine = hetpipe.wrap(layers, make_plan([{"cuts": [5], "sizes": [2, 2]}]), X[:1], mse)
    optimizer = torch.optim.AdamW((p for p in engine.parameters() if p.requires_grad), lr=0.05)
    for _ in range(3):
        engine.step(torch.cat([X, X[:1]]), torch.ones(4, 4, dtype=torch.float64))
        optimizer.step()
    hetpipe.save_checkpoint(engine, optimizer, tmp_path / "saved", 3)
    with torch.no_grad():
        wanted, plain = layers.eval()(X), Library().double()(X)
    hetpipe.export_weights(adapt(library_chain(), seed=3, r=2, **options), tmp_path / "saved", tmp_path / "model")
    ended = run("export-weights", "--checkpoint", tmp_path / "saved", "-o", tmp_path / "said")
    assert ended == (0, f"weights of {tmp_path}/saved/step-00000003 written to {tmp_path}/said\n", "")
    assert (wanted - plain).abs().max() > 1e-3
    for folder in (tmp_path / "model", tmp_path / "said"):
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["r"], config["use_dora"], config["task_type"]) == (2, "use_dora" in options, None)
        assert (with_peft(Library().double(), folder).eval()(X) - wanted).abs().max() < 1e-10
        assert (adapt(library_chain(), weights=str(folder)).eval()(X) - wanted).abs().max() < 1e-10
        if "end" in options.get("targets", ()) and folder.name == "model":
            assert sorted(config["target_modules"]) == ["blocks.1.net.0", "end"]


def test_a_layer_without_a_name_in_the_library_is_told(tmp_path: Path) -> None:
    def chain() -> nn.Sequential:
        inner = [*library_chain().children()]
        return nn.Sequential(*inner[:4], nn.Linear(WIDTH, WIDTH, dtype=torch.float64), inner[4])

    layers = adapt(chain(), seed=3, r=2)
    saved_by_a_loop(tmp_path / "saved", layers)
    with pytest.raises(InputError, match="layer '4' does not say what the library calls its 'weight' .in library_names, as"):
        hetpipe.export_weights(layers, tmp_path / "saved", tmp_path / "out")
    assert hetpipe.load_weights(adapt(chain(), seed=5, r=2), tmp_path / "saved") == 1


KNOWN = ["", "0", "1", "1.norm", "1.net", "1.net.0", "10", "10.norm", "10.net", "10.net.0", "11"]


def test_names_by_which_peft_finds_just_these_modules() -> None:
    targets = [
        (["1.net.0", "10.net.0"], ["1.net.0", "10.net.0"]),
        (["0"], "0"),
        (["1.norm", "10.norm"], ["norm"]),
        (["11"], ["11"]),
        (["0", "1.net.0"], r"0|1\.net\.0"),
    ]
    assert [(paths, target_modules(paths, KNOWN, short=True)) for paths, _ in targets] == targets
    assert target_modules(["1.norm"], KNOWN, short=False) == ["1.norm"]
    assert target_modules(["1.norm", "0"], None, short=True) == r"0|1\.norm"
    whole = [
        (["1.norm", "10.norm"], ["norm"]),
        (["1.norm"], ["1.norm"]),
        (["0"], ["base_model.model.0"]),
        (["11"], ["11"]),
        (["10.norm", "0"], ["10.norm", "base_model.model.0"]),
        ([], None),
    ]
    assert [(paths, modules_to_save(paths, KNOWN, ["1.net.0"], short=True)) for paths, _ in whole] == whole
    assert modules_to_save(["1.norm"], KNOWN, ["1.norm.linear"], short=True) == ["base_model.model.1.norm"]
    assert modules_to_save(["1.norm"], None, [], short=True) == ["base_model.model.1.norm"]
