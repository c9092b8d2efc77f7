"""Of which model adapters are (hetpipe/checkpoints/origin): all its numbers are known, under every plan alike, and adapters do
not go on beside others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hetpipe
from hetpipe import adapt
from hetpipe.building.build import build_layers
from hetpipe.checkpoints.origin.base import base_of
from hetpipe.checkpoints.origin.base_numbers import Known, check_numbers, numbers_of_base, summary
from hetpipe.checkpoints.stores.folder import STATE_FILE
from hetpipe.checkpoints.training_state import BaseNumbers, LoopState
from hetpipe.documents.job import Job
from hetpipe.documents.plan import Backend
from hetpipe.files.messages import InputError
from hetpipe.hf.exports.export import export_weights
from hetpipe.layers.model import mse
from hetpipe.layers.recipe import make_stage
from hetpipe.layers.weights import materialise, read_of
from hetpipe.models import causal_lm
from hetpipe.processes.world import World, alone
from hetpipe.training.start import run_everywhere, train_rank
from tests.support import runs
from tests.support.adapted import KINDS
from tests.support.jobs import Folder
from tests.support.ranks import make_plan
from tests.test_adapter_folders import folder_of, job_of, saved_alone


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("base"), torch.bfloat16)


def changed(folder: Path, to: Path, name: str = "model.embed_tokens.weight", at: tuple[int, ...] = (9, 20)) -> Path:
    """The same model, but for one number in the midst of a tensor, which a few numbers of each do not tell."""
    to.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            tensors[name][at] += 1
            save_file(tensors, to / file.name, metadata={"format": "pt"})
        else:
            (to / file.name).write_bytes(file.read_bytes())
    return to


TRAINED = "with norms, embedding, head"


# ---- the same under every plan ----


class Ranks(SimpleNamespace):
    """Stand for a world whose ranks have said these parts, or, where none is given, for one rank alone."""

    def __init__(self, parts: list[Any], hosts: Sequence[str] = ()) -> None:
        super().__init__(ranks=tuple(range(len(parts) or 1)), hosts=tuple(hosts), parts=parts, said=[])

    def gather(self, own: Any) -> list[Any]:
        self.said.append(own)
        return self.parts or [own]


def together(parts: list[Any], hosts: Sequence[str] = ()) -> World:
    world: Any = Ranks(parts, hosts)
    found: World = world
    return found


def parts_of(make: Callable[[], nn.Sequential], cuts: Sequence[int]) -> tuple[nn.Sequential, list[Any]]:
    """What each rank of a pipeline says, which has built the whole model and given values to its own layers."""
    parts, lo = list[Any](), 0
    for count in cuts:
        layers = make()
        stage = make_stage(layers, lo, lo + count)
        world: Any = Ranks([])
        numbers_of_base(layers, world, stage)
        parts += world.said
        lo += count
    return layers, parts


def numbers(make: Callable[[], nn.Sequential], *plans: Sequence[int]) -> BaseNumbers:
    """Of replicas with such cuts."""
    every = list[Any]()
    for cuts in plans:
        layers, parts = parts_of(make, cuts)
        every += parts
    found = numbers_of_base(layers, together(every))
    assert found is not None
    return found


def tied_in_memory() -> nn.Sequential:
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4), last)


@pytest.mark.parametrize("kind", KINDS)
def test_all_numbers_are_those_under_any_plan(kind: str, base: Path, tmp_path: Path) -> None:
    """Of tensors that are tied, or in few bits, too; and another number is another digest, in its layer."""

    def make(folder: Path = base) -> nn.Sequential:
        return adapt(causal_lm.build(weights=str(folder)), seed=5, r=4, **KINDS[kind])

    whole = numbers(make, (5,))
    names = [name for name, _ in make().named_children()]
    assert list(whole.layers) == [name for name in names if kind != TRAINED or name not in ("embed", "head")]
    assert all(text.startswith("read:") for text in whole.layers.values())
    for plans in ([(1, 1, 1, 1, 1)], [(2, 1, 2), (4, 1)]):
        assert numbers(make, *plans) == whole, plans
    other_numbers = {"embed_tokens": "embed", "layers.1.mlp.up_proj": "layer1", "norm": "head"}
    for short, layer in other_numbers.items():
        name = f"model.{short}.weight"
        if "mlp" not in name and kind != "plain":
            continue
        other = changed(base, tmp_path / name, name, (5,) if short == "norm" else (9, 20))
        found = numbers(lambda other=other: make(other), (2, 3))  # type: ignore[misc]
        assert short == "norm" or base_of(make(other)) == base_of(make()), "a few numbers do not tell"
        assert {own for own, text in found.layers.items() if text != whole.layers[own]} == {layer}, name
        with pytest.raises(InputError, match=rf"^checkpoint c was saved .* with other .*; layer '{layer}' is the first"):
            check_numbers(whole, found, "c")


IN_MEMORY: dict[str, dict[str, Any]] = {
    "as it is": {},
    "fp8": {"base": "fp8"},
    "int8": {"base": "int8"},
    "nf4": {"base": "nf4"},
    "DoRA": {"use_dora": True},
    "nf4, DoRA": {"base": "nf4", "use_dora": True},
}


@pytest.mark.parametrize("kind", IN_MEMORY)
def test_numbers_that_are_in_memory_are_known_as_they_are(kind: str) -> None:
    def make(number: float = 0.0) -> nn.Sequential:
        layers = tied_in_memory()
        with torch.no_grad():
            layers[3].get_parameter("weight")[1, 2] += number
        return adapt(layers, seed=1, r=2, targets=["2", "3"], **IN_MEMORY[kind])

    whole = numbers(make, (5,))
    own = {"4"} if "base" in IN_MEMORY[kind] else set()  # each layer has few bits of its own; else that of layer 4 is that of 0
    assert whole.layers.keys() == {"0", "2", "3"} | own
    assert all(text.startswith("held:") for text in whole.layers.values())
    assert numbers(make, (2, 3)) == numbers(make, (1, 2, 2), (4, 1)) == whole
    found = numbers(lambda: make(1.0), (5,))
    assert {layer for layer, text in found.layers.items() if text != whole.layers[layer]} == {"3"}


def test_what_trains_and_what_adapters_add_is_not_among_them(base: Path) -> None:
    layers = adapt(causal_lm.build(weights=str(base)), seed=1, r=2)
    materialise(layers)
    before = numbers_of_base(layers, alone())
    with torch.no_grad():
        for parameter in (p for p in layers.parameters() if p.requires_grad):
            parameter.add_(1.0)
    assert numbers_of_base(layers, alone()) == before
    layers.double()  # what was read is what counts, whatever it is held in
    assert numbers_of_base(layers, alone()) == before
    assert not any("lora" in name for layer in layers for name in read_of(layer))
    plain = causal_lm.build(weights=str(base))
    materialise(plain)
    assert numbers_of_base(plain, alone()) is None
    assert not any(map(read_of, plain)), "a model without adapters is not looked at"


def test_a_tensor_is_looked_at_once(monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    looked = list[tuple[int, ...]]()

    def look(tensor: torch.Tensor) -> str:
        looked.append(tuple(tensor.shape))
        return "a" * 32

    monkeypatch.setattr("hetpipe.layers.weights.numbers_hash", look)
    layers = adapt(causal_lm.build(weights=str(base)), seed=1, r=2, base="nf4", use_dora=True)
    for _ in range(2):
        materialise(layers)
        numbers_of_base(layers, alone())
    assert sum(shape == (32, 48) for shape in looked) == 3, "one down_proj a layer"
    chain = adapt(tied_in_memory(), seed=1, r=2)
    monkeypatch.setattr("hetpipe.checkpoints.origin.base_numbers.numbers_hash", look)
    looked.clear()
    for _ in range(2):
        numbers_of_base(chain, alone())
    assert len(looked) == 5, "three matrices and two biases"
    with torch.no_grad():
        chain[2].get_parameter("base_layer.weight").add_(1.0)
    numbers_of_base(chain, alone())
    assert len(looked) == 6


def test_ranks_with_other_numbers_are_told(base: Path, tmp_path: Path) -> None:
    """As where the folder on one host is another. They read the tied embedding, each under a name of its own."""
    other = changed(base, tmp_path / "other")

    def make(folder: Path) -> nn.Sequential:
        return adapt(causal_lm.build(weights=str(folder)), seed=1, r=2)

    layers, parts = parts_of(lambda: make(base), (2, 2, 1))
    strange = parts_of(lambda: make(other), (4, 1))[1]
    told = r" have different numbers in 'embed\.\S*weight' of the model beside the adapters. Give all hosts the same"
    with pytest.raises(InputError, match=rf"^rank 0 on host a and rank 3 on host b{told}"):
        numbers_of_base(layers, together([*parts, *strange], hosts=("a", "a", "a", "b", "b")))
    with pytest.raises(InputError, match=rf"^rank 0 and rank 1{told}"):
        numbers_of_base(layers, together([parts[0], strange[1]]))


def test_what_is_known_in_another_way_is_not_compared() -> None:
    def of(*rows: tuple[str, str, str]) -> BaseNumbers:
        return summary({name: Known(how, hash) for name, how, hash in rows}, ["a", "b"])

    saved = of(("a.w", "read", "1"), ("b.w", "read", "2"))
    check_numbers(None, saved, "c")
    check_numbers(saved, None, "c")
    check_numbers(saved, of(("a.w", "held", "3"), ("b.w", "held", "4")), "c")
    check_numbers(saved, of(("a.w", "read", "1"), ("b.w", "held", "4")), "c")
    with pytest.raises(InputError, match="layer 'a' is the first"):
        check_numbers(saved, of(("a.w", "read", "3"), ("b.w", "held", "4")), "c")
    mixed = of(("a.w", "read", "1"), ("a.v", "held", "2"))
    assert mixed.layers["a"].startswith("both:")
    short = saved.model_copy(update={"digest": "0" * 32})
    with pytest.raises(InputError, match="with other numbers, under the same names and shapes. Give the model the weights"):
        check_numbers(short, saved, "c")


# ---- runs, loops and readers ----


def test_a_job_goes_on_beside_the_same_numbers_only(base: Path, tmp_path: Path) -> None:
    """Under another plan, too. One word's row had changed unseen."""
    folder = tmp_path / "own"
    changed(base, folder, at=(9, 20))
    made = Folder(tmp_path)
    file = job_of(made, folder, {"r": 4, "base": "nf4", "use_dora": True}, ({"cuts": [2, 3], "sizes": [6]},))
    run_everywhere(Job.read(file, ["train.steps=2"]), train_rank)
    state = json.loads((tmp_path / "saved" / "step-00000002" / STATE_FILE).read_text())
    found = BaseNumbers.model_validate(state["base_numbers"])
    layers = build_layers(Job.read(file))
    materialise(layers)
    assert numbers_of_base(layers, alone()) == found
    job_of(made, folder, {"r": 4, "base": "nf4", "use_dora": True}, ({"cuts": [5], "sizes": [6]},))
    assert len(runs.alone(file, "train.steps=3").losses) == 1
    changed(folder, folder)
    with pytest.raises(InputError, match="; layer 'embed' is the first that differs. Give the model the weights that it had"):
        runs.alone(file, "train.steps=4")


def test_readers_compare_what_they_read(base: Path, tmp_path: Path) -> None:
    job, saved, layers = saved_alone(tmp_path, base, {"r": 4, "base": "int8"})
    found, file = numbers_of_base(layers, alone()), saved / STATE_FILE
    assert found is not None
    state = LoopState.load(file)
    assert state.base_numbers == found
    other = Job.read(tmp_path / "job.yaml", ["train.dtype=float32", f"model.args.weights={changed(base, tmp_path / 'other')}"])
    hetpipe.load_weights(build_layers(job), saved)
    export_weights(build_layers(job), saved, tmp_path / "merged", merge=True)
    export_weights(build_layers(other), saved, tmp_path / "adapter")  # which does not read the base
    told = "with other numbers, under the same names and shapes; layer 'embed' is the first that differs"
    with pytest.raises(InputError, match=told):
        hetpipe.load_weights(build_layers(other), saved)
    with pytest.raises(InputError, match=told):
        export_weights(build_layers(other), saved, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()
    plain = json.loads(file.read_text())
    del plain["base_numbers"], plain["digest"]
    file.write_text(json.dumps(plain))
    hetpipe.load_weights(build_layers(other), saved)  # as of a version that did not say


@pytest.mark.parametrize(("kind", "backend"), [*((kind, "torch") for kind in IN_MEMORY), ("int8", "fairscale")])
def test_a_loop_of_ones_own_goes_on_beside_the_same_numbers_only(kind: str, backend: Backend, tmp_path: Path) -> None:
    cuts = [5] if backend == "torch" else [3, 2]
    plan = make_plan([{"cuts": cuts, "sizes": [2, 2], "devices": [f"n0/{s}" for s in range(len(cuts))]}], schedule="gpipe")
    rows = torch.randn(4, 4)

    def opened(number: float = 0.0) -> Any:
        layers = tied_in_memory()
        with torch.no_grad():
            layers[0].get_parameter("weight")[1, 2] += number
        layers = adapt(layers, seed=1, r=2, targets=["2", "3"], **IN_MEMORY[kind])
        engine = hetpipe.wrap(layers, plan, rows, mse, backend=backend)
        return engine, torch.optim.AdamW(engine.trained_parameters(), lr=0.1)

    try:
        engine, optimizer = opened()
        for step in (1, 2):
            engine.step(rows, rows)
            optimizer.step()
            hetpipe.save_checkpoint(engine, optimizer, tmp_path, step)
        engine.close()
        engine, optimizer = opened()
        assert hetpipe.load_checkpoint(engine, optimizer, tmp_path) == 2
        engine.close()
        engine, optimizer = opened(0.5)
        told = "with other numbers, under .*; layer '0' is the first that|of the model [0-9a-f]+, but the model has"
        with pytest.raises(InputError, match=told):
            hetpipe.load_checkpoint(engine, optimizer, tmp_path)
        engine.close()
    finally:
        torch.distributed.destroy_process_group()
