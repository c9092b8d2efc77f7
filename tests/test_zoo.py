"""gpt2, bert, llama and t5: the same bits as transformers' own; trained from a folder, over unequal stages, back to a folder."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bench.reference import ReferenceEngine
from hetpipe.checkpoints import checkpoint
from hetpipe.files.messages import InputError
from hetpipe.hf.chain import HFLayer
from hetpipe.hf.exports.export import export_weights
from hetpipe.layers.device import one_thread
from hetpipe.layers.model import Model
from hetpipe.layers.transforms import tensors_of
from hetpipe.layers.weights import empty_names, materialise, state_of
from hetpipe.measuring.profiler import profile_model
from hetpipe.models import gpt2, llama
from tests.support.ranks import cluster_of, run_ranks
from tests.support.zoo import KINDS, ZOO, adapted, batch, compiled, optimizer_of, train_zoo, transformers_model, ways_of
from tests.test_checkpoint import ALONE


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread(torch.device("cpu")):
        yield


def hf_names(layers: nn.Sequential) -> dict[str, str]:
    found = dict[str, str]()
    for child, layer in layers.named_children():
        assert isinstance(layer, HFLayer)
        found |= {f"{child}.{own}": layer.origin.first_names[hf] for own, hf in layer.library_names.items()}
    return found


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).abs().max())


@functools.cache
def pair(name: str, attention: str, folder: Path) -> tuple[PreTrainedModel, nn.Sequential]:
    """transformers' model with dropout, and the layers with the weights that it saved."""
    reference = transformers_model(name, ZOO[name].config, attention)
    reference.save_pretrained(folder)
    layers = ZOO[name].build(weights=str(folder), attention=attention)
    materialise(layers)
    return reference, layers


MASKS = {"padded": (True, True), "full": (False, True), "no mask": (False, False)}


@pytest.mark.parametrize("mode", ["eval", "dropout"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "mask"), [(name, mask) for name in ZOO for mask in MASKS if (name, mask) != ("t5", "no mask")])
def test_logits_loss_and_all_gradients_are_the_same_bits(
    name: str, mask: str, attention: str, mode: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    padded, masked = MASKS[mask]
    reference, layers = pair(name, attention, tmp_path_factory.getbasetemp() / f"{name}-{attention}")
    inputs, targets, arguments = batch(name, padded=padded, masked=masked)
    for model in (reference, layers):
        model.train(mode == "dropout")
        model.zero_grad()
    torch.manual_seed(5)
    wanted = reference(**arguments)
    wanted.loss.backward()
    torch.manual_seed(5)
    logits = layers(inputs)
    loss = ZOO[name].loss().function(logits, targets)
    loss.backward()
    assert torch.equal(logits, wanted.logits)
    assert torch.equal(loss, wanted.loss)
    gradients = {hf: reference.get_parameter(hf).grad for hf, _ in reference.named_parameters()}
    own = {hf: layers.get_parameter(n).grad for n, hf in hf_names(layers).items() if n in dict(layers.named_parameters())}
    assert own.keys() == gradients.keys()
    for hf, gradient in gradients.items():
        mine = own[hf]
        assert gradient is not None
        assert mine is not None
        assert torch.equal(mine, gradient), hf


def test_dropout_is_there() -> None:
    """What the bits of the comparison above would not tell: that dropout and the mask change something."""
    layers = ZOO["t5"].build(**ZOO["t5"].config)
    materialise(layers)
    (inputs, _, _), (full, _, _) = batch("t5"), batch("t5", padded=False)
    outputs = [layers(inputs), layers(inputs), layers.eval()(inputs), layers(inputs), layers(full)]
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2], outputs[3])
    assert not torch.equal(outputs[3], outputs[4])


# ---- from a folder, over three unequal stages, and back ----


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Each model saved by transformers; trained on three ranks; trained by transformers on one device. One spawn."""
    folder = tmp_path_factory.mktemp("zoo")
    found: dict[str, dict[str, Any]] = {}
    for name, zoo in ZOO.items():
        reference = transformers_model(name, zoo.without_dropout())
        reference.save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text("{}")
        found[name] = {"folder": folder / name, "reference": reference.double()}
    ranks = run_ranks(train_zoo, cluster_of(3), {name: str(row["folder"]) for name, row in found.items()})
    for name, row in found.items():
        row["ranks"], row["memory"] = [rank[name] for rank in ranks], [rank["memory"] for rank in ranks]
        row["wrapped"] = [rank["wrapped"] for rank in ranks]
        row["losses"] = train_with_transformers(name, row["reference"])
    return found


def train_with_transformers(name: str, model: PreTrainedModel) -> list[float]:
    model.train()
    optimizer, losses = optimizer_of(model.parameters()), []
    for step in range(3):
        _, targets, arguments = batch(name, step)
        arguments = {key: value for key, value in arguments.items() if key != "labels"}
        if name == "t5":
            arguments["decoder_input_ids"] = batch(name, step)[0][2]
        optimizer.zero_grad()
        loss = ZOO[name].loss().function(model(**arguments).logits, targets)  # its own loss is of float32
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", ZOO)
def test_three_unequal_stages_train_as_transformers_does(name: str, trained: dict[str, dict[str, Any]]) -> None:
    row = trained[name]
    names, truth = hf_names(ZOO[name].build(weights=str(row["folder"]))), tensors_of(row["reference"])
    for how in ("1f1b", *ways_of(name)):
        seen = set[str]()
        for rank in row["ranks"]:
            result = rank if how == "1f1b" else rank["otherwise"][how]
            if result["state"]:
                assert result["losses"] == pytest.approx(row["losses"], abs=1e-10, rel=0)
            for own, value in result["state"].items():
                kept = own.rpartition(".")[2] in ("inv_freq", "original_inv_freq")  # in float32, as from_pretrained does
                assert value.dtype == torch.float64 or kept or not value.is_floating_point()
                assert distance(value, truth[names[own]]) < 1e-10, (how, own)
                seen.add(own)
        assert seen == names.keys()


@pytest.mark.parametrize("name", ZOO)
def test_a_stage_has_values_for_its_own_layers_only(name: str, trained: dict[str, dict[str, Any]]) -> None:
    names = [child for child, _ in ZOO[name].build(**ZOO[name].config).named_children()]
    at = 0
    for rank, count in zip(trained[name]["ranks"], ZOO[name].cuts, strict=True):
        tied = {"embed"} if name in ("t5", "qwen3") else set()  # nothing but the shared embedding
        assert set(rank["held"]) - tied == set(names[at : at + count]) - tied
        at += count


def test_resident_memory_of_a_stage(trained: dict[str, dict[str, Any]]) -> None:
    rows = trained["gpt2"]["memory"]
    assert [row["own"] < 0.6 * row["whole"] for row in rows] == [True] * 3
    assert sum(row["own"] for row in rows) > rows[0]["whole"] > 120 << 20
    for row in rows:
        assert 0.9 * row["own"] < row["peak"] - row["before"] < 1.1 * row["own"] + (16 << 20)


@pytest.mark.parametrize("shard_bytes", [1 << 30, 1 << 14], ids=["one file", "some files"])
@pytest.mark.parametrize("name", ZOO)
def test_back_to_a_folder_that_transformers_loads(
    name: str, shard_bytes: int, trained: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = trained[name]
    monkeypatch.setattr("hetpipe.hf.exports.export.SHARD_BYTES", shard_bytes)
    layers = ZOO[name].build(weights=str(row["folder"]))
    export_weights(layers, Path(row["ranks"][0]["checkpoint"]), tmp_path / "out")
    assert all(empty_names(layer) for layer in layers if list(layer.parameters()))  # nothing was needed of the model but names
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (shard_bytes > 1 << 20)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    found: Any = KINDS[name].from_pretrained(tmp_path / "out", output_loading_info=True)
    loaded, info = found
    assert not any(info.values()), info
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [KINDS[name].__name__]
    assert loaded.config.dtype == torch.float64
    truth = tensors_of(row["reference"])
    for hf, value in loaded.named_parameters():
        assert value.dtype == torch.float64
        assert distance(value, truth[hf]) < 1e-10, hf
    again = ZOO[name].build(weights=str(tmp_path / "out"))
    materialise(again)
    own = hf_names(again)
    assert all(distance(value, truth[own[n]]) < 1e-6 for n, value in tensors_of(again).items())


def test_export_refuses(trained: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    saved = Path(trained["gpt2"]["ranks"][0]["checkpoint"])
    with pytest.raises(InputError, match=r"is not of the job's model:\n  it has no '0.weight', which the model has\n"):
        export_weights(nn.Sequential(nn.Linear(2, 2)), saved, tmp_path / "a")
    other = gpt2.build(**{**ZOO["gpt2"].config, "n_layer": 4})
    with pytest.raises(
        InputError, match=r"has no 'block3\.\S+' \(12 tensors of the model are not in it\): it was saved from ano"
    ):
        export_weights(other, saved, tmp_path / "b")
    with pytest.raises(InputError, match=r"the folder .* is not empty \(it holds 'config.json'\); name a new one"):
        export_weights(gpt2.build(**ZOO["gpt2"].config), saved, trained["gpt2"]["folder"])


# ---- adapters and compiled layers ----


def test_adapters_and_compiled_layers_train_under_their_own_names(trained: dict[str, dict[str, Any]]) -> None:
    """As one device does without compiling; and the checkpoint is that of a model of which nothing is compiled."""
    ranks, folder = trained["llama"]["wrapped"], str(trained["llama"]["folder"])
    plain = adapted(weights=folder).to(torch.float64)
    materialise(plain)
    names = list(plain.state_dict())
    assert "layer0.layer.self_attn.q_proj.lora_B.default.weight" in names
    assert sorted(name for rank in ranks for name in rank["state"]) == sorted(names)
    assert [name for rank in ranks for name in rank["names"]] == [name for name, _ in plain.named_parameters()]
    assert all(rank["zeros"] and rank["back"] for rank in ranks)
    inputs, targets, _ = batch("llama")
    engine = ReferenceEngine(plain, ZOO["llama"].loss())
    optimizer = optimizer_of([p for p in plain.parameters() if p.requires_grad])
    assert ranks[0]["loss"] == pytest.approx(engine.step(inputs, targets), abs=1e-10)
    optimizer.step()
    for rank in ranks:
        assert all(distance(value, plain.state_dict()[name]) < 1e-10 for name, value in rank["state"].items())
    again = adapted(weights=folder).to(torch.float64)
    materialise(again)
    checkpoint.load(Path(ranks[0]["checkpoint"]), again, optimizer_of([p for p in again.parameters() if p.requires_grad]), ALONE)
    assert all(distance(value, plain.state_dict()[name]) < 1e-10 for name, value in again.state_dict().items())


def test_exports_of_compiled_layers_and_of_adapters(trained: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    row = trained["llama"]
    layers, saved = llama.build(weights=str(row["folder"])), Path(row["ranks"][0]["checkpoint"])
    export_weights(compiled(layers), saved, tmp_path / "out")
    again = llama.build(weights=str(tmp_path / "out"))
    materialise(again)
    own, truth = hf_names(again), tensors_of(row["reference"])
    assert all(distance(value, truth[own[n]]) < 1e-6 for n, value in tensors_of(again).items())
    with pytest.raises(
        InputError, match=r"^layer 'layer0' has 'layer\.self_attn\.q_proj\.base_layer\.weight' \(6 such\), for which a folder of "
    ):
        export_weights(adapted(weights=str(row["folder"])), Path(row["wrapped"][0]["checkpoint"]), tmp_path / "none")


@pytest.mark.parametrize("where", ["drawn", "folder"])
def test_adapters_leave_the_values_of_what_they_wrap(where: str, trained: dict[str, dict[str, Any]]) -> None:
    given = ZOO["llama"].config if where == "drawn" else {"weights": str(trained["llama"]["folder"])}
    torch.manual_seed(4)
    plain, layers = llama.build(**given), adapted(**given)
    materialise(plain)
    materialise(compiled(layers))
    found = {name: t for name, t in state_of(layers).items() if ".lora_" not in name}
    assert len(found) == len(plain.state_dict())
    for name, value in found.items():
        assert torch.equal(value, plain.state_dict()[name.replace("base_layer.", "")]), name


def test_adapters_without_values_are_named() -> None:
    layers = adapted("meta", **ZOO["llama"].config)
    with pytest.raises(
        InputError,
        match=r"^layer 'layer0': 'layer\.self_attn\.q_proj\.lora_A\.default\.weight' is on the meta device, and LlamaForCausalLM "
        r"has no tensor of that name \(4 such\) whose values could be read or drawn\. Add adapters with hetpipe\.adapt.*'base_la",
    ):
        materialise(layers)
    kept = llama.build(**ZOO["llama"].config)
    head, wrapper = kept[-1].get_submodule("lm_head"), nn.Module()  # as peft's modules_to_save
    wrapper.original_module = head
    wrapper.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(head)})
    kept[-1].lm_head = wrapper
    materialise(kept)
    first, second = (wrapper.get_parameter(f"{name}.weight") for name in ("original_module", "modules_to_save.default"))
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


# ---- values ----


def drawn(layers: nn.Sequential, lo: int, hi: int) -> dict[str, Tensor]:
    materialise(layers, lo, hi)
    return {name: t.detach() for name, t in tensors_of(layers).items() if not t.is_meta}


@pytest.mark.parametrize("name", ZOO)
def test_the_seed_decides_the_values_and_no_cut_does(name: str) -> None:
    def built(seed: int = 1) -> nn.Sequential:
        torch.manual_seed(seed)
        return ZOO[name].build(**ZOO[name].config)

    whole, parts, other = drawn(built(), 0, 99), dict[str, Tensor](), drawn(built(2), 0, 99)
    cuts = [0, *torch.tensor(ZOO[name].cuts).cumsum(0).tolist()]
    for lo, hi in itertools.pairwise(cuts):
        found = drawn(built(), lo, hi)
        assert all(torch.equal(value, whole[n]) for n, value in found.items())
        parts |= found
    assert parts.keys() == whole.keys()
    differ = [n for n, value in whole.items() if value.is_floating_point() and not torch.equal(value, other[n])]
    assert len(differ) > len(whole) / 3


@pytest.mark.parametrize("name", ZOO)
def test_values_are_distributed_as_transformers_draws_them(name: str) -> None:
    layers = ZOO[name].build(**ZOO[name].config)
    materialise(layers)
    wanted, names = tensors_of(transformers_model(name, ZOO[name].config)), hf_names(layers)
    for own, value in tensors_of(layers).items():
        reference = wanted[names[own]]
        if not reference.is_floating_point() or reference.dim() == 1:
            assert torch.equal(value, reference), own
        else:
            assert float((value.std() / reference.std()).detach()) == pytest.approx(1, abs=0.2), own


def test_a_profile_of_empty_layers_is_that_of_filled_ones_and_leaves_them_empty() -> None:
    inputs, targets, _ = batch("t5")
    profiles = []
    for fill in (False, True):
        layers = ZOO["t5"].build(**ZOO["t5"].config)
        if fill:
            materialise(layers)
        model = Model(name="t5", layers=layers, inputs=inputs, targets=targets, loss=ZOO["t5"].loss())
        profiles.append(profile_model(model, microbatch_sizes=[1, 2], repeats=1))
        assert [t.is_meta for t in tensors_of(layers).values()] == [not fill] * len(tensors_of(layers))
    assert profiles[0].layers == profiles[1].layers
    assert all(layer.saved_bytes_per_sample > 0 for layer in profiles[0].layers)
    assert min(profiles[0].measurements[0].backward_seconds[1]) > 0
