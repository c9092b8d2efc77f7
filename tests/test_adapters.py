"""Adapters: as peft has them, whatever a rank holds; what few bits hold; folders that peft loads. What else trains over unequal
stages is in test_transparency.py."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hetpipe import adapt, load_weights
from hetpipe.building.build import build_layers
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.base import adapter_keys, base_of, pinned_base
from hetpipe.checkpoints.resume import compare, identity
from hetpipe.files.messages import InputError
from hetpipe.hf.export import export_weights
from hetpipe.hf.folder import WeightFolder
from hetpipe.layers.adapters.quantised import LINEAR, QuantisedLinear
from hetpipe.layers.model import evaluating
from hetpipe.layers.split import trace_boundaries
from hetpipe.layers.weights import empty_names, materialise, state_of
from hetpipe.models import causal_lm
from hetpipe.processes.world import alone
from hetpipe.spec.job import Job
from hetpipe.training.start import run_everywhere, train_rank
from tests.support.jobs import Folder, train
from tests.support.zoo import WORDS
from tests.test_causal_lm import tiny

import transformers  # isort: skip  # offline, as tests.support.zoo sets it

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "head_dim": 8, "vocab_size": WORDS, "max_position_embeddings": 32}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "DoRA": {"use_dora": True},
    "rsLoRA of two": {"rank_stabilized": True, "targets": ["q_proj", "v_proj"]},
    "nf4, DoRA": {"base": "nf4", "use_dora": True},
    "int8": {"base": "int8"},
    "with norms, embedding, head": {"train_also": ["norms", "embed", "head"]},
    "of embedding and head": {"targets": ["embed_tokens", "lm_head"]},
}


def qwen3(**more: Any) -> nn.Sequential:
    torch.manual_seed(3)
    return causal_lm.build(type="qwen3", **SIZES, **more)


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(WORDS, (rows, 9), generator=torch.Generator().manual_seed(1))


def logits(layers: nn.Sequential) -> Tensor:
    with torch.no_grad(), evaluating(layers):
        found: Tensor = layers(tokens())
    return found


def trained_a_little(layers: nn.Sequential) -> nn.Sequential:
    draw = torch.Generator().manual_seed(2)
    for parameter in layers.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    return layers


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_on_the_meta_device_are_those_of_a_model_with_values(kind: str) -> None:
    """And change nothing before the first step."""
    plain, empty, full = qwen3(), adapt(qwen3(), seed=5, r=4, **KINDS[kind]), qwen3()
    materialise(plain)
    materialise(full)
    full = adapt(full, seed=5, r=4, **KINDS[kind])
    assert all(empty_names(layer) for layer in empty)
    trace_boundaries(empty, tokens())
    materialise(empty)
    assert torch.equal(logits(empty), logits(full))
    assert all(torch.equal(a, b) for a, b in zip(state_of(empty).values(), state_of(full).values(), strict=True))
    off = (logits(empty) - logits(plain)).abs().max()
    assert off == 0 if "base" not in KINDS[kind] else 0 < off < 0.3


def test_another_seed_or_name_gives_other_values() -> None:
    first, other = (adapt(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)), seed=s, r=2) for s in (1, 2))
    a, b = (state_of(first)[f"{i}.lora_A.default.weight"] for i in (0, 1))
    assert not torch.equal(a, b)
    assert not torch.equal(a, state_of(other)["0.lora_A.default.weight"])
    assert list(state_of(first)) == [f"{i}.lora_{which}.default.weight" for i in (0, 1) for which in "AB"]


def test_the_callers_random_numbers_are_left_as_they_were() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = torch.random.get_rng_state()
    adapt(layers, seed=1, r=2)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("bits", LINEAR)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_few_bits_compute_as_the_matrix_that_they_hold(bits: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(50, 33)
    few = LINEAR[bits](linear)
    x = torch.randn(5, 50, dtype=dtype, requires_grad=True)
    few(x).sum().backward()
    matrix, given = few.matrix(dtype), x.detach().requires_grad_()
    out = given @ matrix.T + linear.bias.to(dtype)
    out.sum().backward()
    assert torch.equal(few(x), out)
    assert given.grad is not None
    assert x.grad is not None
    assert torch.equal(x.grad, given.grad)
    step = {"nf4": 0.16, "int8": 0.5 / 127}[bits]  # half the widest step, of the largest number in a block, or a row
    assert (few.weight - linear.weight).abs().max() <= step * 1.02 * linear.weight.abs().max()


@pytest.mark.parametrize("bits", LINEAR)
def test_few_bits_stay_what_they_are_in_other_types(bits: Any) -> None:
    layers = adapt(nn.Sequential(nn.Linear(70, 40), nn.Linear(40, 2)), seed=1, base=bits)
    few = next(module for module in layers.modules() if isinstance(module, QuantisedLinear))
    before = {name: (tensor.dtype, tensor.clone()) for name, tensor in few.named_buffers()}
    layers.to(torch.bfloat16)
    assert all(tensor.dtype == before[name][0] and torch.equal(tensor, before[name][1]) for name, tensor in few.named_buffers())
    assert few.state_dict().keys() == {"bias"}
    few.eval()(torch.randn(2, 70))  # bitsandbytes' own gives no gradient after this on some processors
    x = torch.randn(2, 70, requires_grad=True)
    few.train()(x).sum().backward()
    assert x.grad is not None


def test_nf4_is_that_of_bitsandbytes() -> None:
    import bitsandbytes

    torch.manual_seed(0)
    linear = nn.Linear(96, 80, bias=False)
    few: Any = bitsandbytes
    theirs = few.nn.Params4bit(linear.weight.data.clone(), requires_grad=False, quant_type="nf4").to("cpu")
    matrix = few.functional.dequantize_4bit(theirs.data, theirs.quant_state)
    assert torch.allclose(LINEAR["nf4"](linear).weight, matrix, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("options", "reason"), [
    ({"r": 0}, "r: Input should be greater than or equal to 1"),
    ({"rank": 4}, r"unknown key 'rank': it is called r: 'adapter: \{r: 16\}'"),
    ({"targets": "q_proj"}, r"write all-linear, or a list, as in \[q_proj, v_proj\]"),
    ({"targets": ["q_prj"]}, "'q_prj' is no module of the model; did you mean 'q_proj'"),
    ({"targets": ["input_layernorm"]}, "'input_layernorm' is a Qwen3RMSNorm: adapters are added to linear layers and embeddings"),
    ({"targets": ["q_proj", "q_proj"]}, "targets has 'q_proj' twice"),
    ({"train_also": ["heads"]}, "train_also.0: .*'heads'"),
    ({"base": "bf16"}, r"hetpipe.adapt: base bf16: hold the model so before"),
    ({"base": "int4"}, "base: .*'int4'"),
    ({"dropout": 1.0}, "dropout: Input should be less than 1"),
])  # fmt: skip
def test_what_cannot_be_adapted_is_told(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        adapt(qwen3(), **options)


def test_a_model_without_linear_layers_is_told() -> None:
    with pytest.raises(InputError, match="the model has no linear layer before its last layer"):
        adapt(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    with pytest.raises(InputError, match="adapter.train_also has 'embed', and the model has none"):
        adapt(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), train_also=["embed"])


class Taking(nn.Module):
    """Takes the matrix, as the states of Mamba do, and does not call what has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.first(x), self.second.weight)


def test_adapters_that_change_nothing_are_told() -> None:
    x = torch.randn(2, 4)
    for device in ("cpu", "meta"):
        with torch.device(device):
            layers = nn.Sequential(Taking(), nn.Linear(4, 2))
        told = r"the adapter of '0\.second' \(1 such module\) changes nothing"
        with pytest.raises(InputError, match=told):
            trace_boundaries(adapt(layers, seed=1), x, torch.device("cpu"), backward=True)
    trace_boundaries(adapt(nn.Sequential(Taking(), nn.Linear(4, 2)), seed=1, targets=["first"]), x, backward=True)


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.first(x)))
        return out


def hooked() -> nn.Linear:
    linear = nn.Linear(4, 4)
    linear.register_forward_hook(lambda _module, _given, out: 3 * out)
    return linear


def infinite() -> nn.Linear:
    linear = nn.Linear(4, 4)
    with torch.no_grad():
        linear.weight[1, 2] = torch.inf
    return linear


@pytest.mark.parametrize(("make", "options", "reason"), [
    (lambda: Twice(), {}, "'0.first' and '0.second' are one module, which would get two adapters"),
    (lambda: adapt(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), seed=1)[0], {}, "the model has adapters already"),
    (lambda: nn.TransformerEncoderLayer(4, 2, 8), {"targets": ["linear1"]}, "which takes its matrix for itself in evaluation"),
    (hooked, {"base": "int8"}, "'0' has hooks, which would be lost with base int8"),
    (infinite, {"base": "int8"}, r"a matrix of shape \[4, 4\] holds infinite numbers"),
    (infinite, {"base": "nf4"}, r"a matrix of shape \[4, 4\] holds infinite numbers"),
    (lambda: nn.Embedding(4, 4), {"targets": ["0"], "use_dora": True}, "'0' is an embedding"),
    (lambda: nn.Embedding(4, 4), {"targets": ["0"], "train_also": ["embed"]}, "is in adapter.targets, and trains as a whole by"),
])  # fmt: skip
def test_what_would_go_wrong_in_silence_is_told(make: Any, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        adapt(nn.Sequential(make(), nn.Linear(4, 2)), seed=1, **options)


def test_a_module_at_two_places_stays_one_beside_few_bits() -> None:
    plain = nn.Sequential(Twice(), nn.Linear(4, 4), nn.Linear(4, 2))
    x, matrix = torch.randn(2, 4), plain[0].get_parameter("first.weight")
    layers = adapt(plain, seed=1, base="int8", targets=["1"])
    assert layers[0].first is layers[0].second
    assert layers[0].get_parameter("first.weight") is matrix
    assert layers(x).shape == (2, 2)


def test_dora_of_a_layer_that_is_a_linear_layer() -> None:
    layers = adapt(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), seed=1, r=2, use_dora=True)
    assert "0.lora_magnitude_vector.default.weight" in state_of(layers)


# ---- jobs, checkpoints and folders ----


def folder_of(folder: Path, dtype: torch.dtype) -> Path:
    torch.manual_seed(4)
    model: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, tie_word_embeddings=True))
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a small model, in bf16."""
    return folder_of(tmp_path_factory.mktemp("base"), torch.bfloat16)


ROWS = ({"cuts": [2, 1, 2], "sizes": [2, 2]}, {"cuts": [5], "sizes": [2]})


def job_of(folder: Folder, base: Path, adapter: dict[str, Any], rows: Sequence[dict[str, Any]] = ROWS, **keys: Any) -> Path:
    return folder.ready(
        rows=rows, counts=[len(row["cuts"]) for row in rows], data={"target": "tests.support.adapted:words"}, adapter=adapter,
        model={"name": "causal_lm", "args": {"weights": str(base), "extras": []}},
        loss={"name": "cross_entropy", "weight": "tokens"}, checkpoint={"folder": str(folder.path / "saved"), "every_steps": 2},
        train=train(**{"global_batch": 6, "steps": 4, "scheduler": None} | keys),
    )  # fmt: skip


def test_a_job_trains_over_unequal_stages_as_on_one_device(base: Path, tmp_path: Path) -> None:
    """In float64, over a base in 4 bits, with dropout off; the checkpoint holds what trains, and says of which base that is."""
    found = []
    for name, rows in (("many", ROWS), ("one", ({"cuts": [5], "sizes": [6]},))):
        (tmp_path / name).mkdir()
        file = job_of(Folder(tmp_path / name), base, {"r": 4, "base": "nf4", "use_dora": True, "train_also": ["norms"]}, rows)
        run_everywhere(Job.read(file), train_rank)
        saved = tmp_path / name / "saved" / "step-00000004"
        found.append({key: tensor for part in saved.glob("*.safetensors") for key, tensor in load_file(part).items()})
    many, one = found
    names = {key.removeprefix("model.") for key in many if key.startswith("model.")}
    assert names == set(state_of(build_layers(Job.read(file))))
    assert many.keys() == one.keys()
    assert max(float((many[key] - one[key]).abs().max()) for key in many) < 1e-10


def saved_alone(folder: Path, base: Path, adapter: dict[str, Any]) -> tuple[Job, Path, nn.Sequential]:
    """A job, a checkpoint as its run would leave it, and the model of that."""
    job = Job.read(job_of(Folder(folder), base, adapter, dtype="float32"))
    layers = build_layers(job)
    materialise(layers)
    trained_a_little(layers)
    extra = {"base": base_of(layers), "adapter": adapter_keys(layers)}
    return job, checkpoint.save(folder / "saved", 1, layers, torch.optim.SGD(layers.parameters()), extra, alone(), keep=1), layers


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_trained_is_loaded_by_peft(kind: str, base: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    job, saved, layers = saved_alone(tmp_path, base, {"r": 4, **KINDS[kind]})
    again = build_layers(job)
    load_weights(again, saved)
    ours = logits(layers)
    assert torch.equal(logits(again), ours)
    export_weights(build_layers(job), saved, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["task_type"], config["r"]) == (str(base), "CAUSAL_LM", 4)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of what is saved beside adapters where the head is tied
        loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    if "base" in KINDS[kind]:  # theirs has all its bits; what was trained is there
        theirs = {name.replace(".default", ""): p for name, p in loaded.named_parameters() if "lora_" in name}
        assert len(theirs) == len(state_of(layers))
    else:
        assert (ours - loaded.eval()(tokens()).logits).abs().max() < 1e-5 * ours.abs().max()


@pytest.mark.parametrize("kind", ["plain", "nf4, DoRA", "int8", "with norms, embedding, head"])
@pytest.mark.parametrize(("dtype", "shard_bytes", "off"), [(torch.float32, 1 << 30, 1e-5), (torch.bfloat16, 1 << 14, 0.1)])
def test_merged_it_is_a_model_of_transformers(
    kind: str, dtype: torch.dtype, shard_bytes: int, off: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the number type of the base; what few bits held is as it was trained with."""
    monkeypatch.setattr("hetpipe.hf.export.SHARD_BYTES", shard_bytes)
    base = folder_of(tmp_path / "base", dtype)
    job, saved, layers = saved_alone(tmp_path, base, {"r": 4, **KINDS[kind]})
    empty = build_layers(job)
    out = export_weights(empty, saved, tmp_path / "merged", merge=True)
    assert all(empty_names(layer) for layer in empty)
    assert (len([*out.glob("*.safetensors")]) > 1) == (shard_bytes < 1 << 20)
    wanted, found = WeightFolder(base), WeightFolder(out)
    assert sorted(found) == sorted(wanted)
    assert {found.type_of(name) for name in found} == {dtype}
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    whole, info = loaded
    assert not any(info.values()), info
    ours, theirs = logits(layers), whole.eval()(tokens()).logits
    assert (ours - theirs).abs().max() < off * ours.abs().max(), "but for the rounding to bf16"


def test_adapters_go_on_with_their_own_base_only(base: Path, tmp_path: Path) -> None:
    job, _, layers = saved_alone(tmp_path, base, {"r": 4})
    saved = identity(job) | pinned_base(layers)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "moved")
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[0] += 1
    model.save_pretrained(tmp_path / "other")

    def own(*settings: str) -> dict[str, Any]:
        changed = Job.read(tmp_path / "job.yaml", ["train.dtype=float32", *settings])
        return identity(changed) | pinned_base(build_layers(changed))

    said = compare(saved, own(f"model.args.weights={tmp_path / 'moved'}"), tmp_path)
    assert said is not None
    assert "model.args.weights was" in said
    with pytest.raises(InputError, match="the adapters that were saved are of another model: write model.args.weights as it was"):
        compare(saved, own(f"model.args.weights={tmp_path / 'other'}"), tmp_path)
    for setting, told in (("adapter.r=8", "adapter.r was 4, is 8"), ("adapter=null", "adapter.r was 4, is None")):
        with pytest.raises(InputError, match=told):
            compare(saved, own(setting), tmp_path)
    assert "adapter.dropout was 0.0, is 0.1" in str(compare(saved, own("adapter.dropout=0.1"), tmp_path))
    with pytest.raises(InputError, match="was saved with adapters of the model .*, and now there are adapters of the model"):
        export_weights(build_layers(Job.read(tmp_path / "job.yaml", [f"model.args.weights={tmp_path / 'other'}"])),
                       next((tmp_path / "saved").iterdir()), tmp_path / "out")  # fmt: skip


def test_adapters_are_those_that_were_saved(base: Path, tmp_path: Path) -> None:
    _, saved, _ = saved_alone(tmp_path, base, {"r": 4})
    changes = {"adapter.alpha=320": "adapter.alpha was 32.0, is 320.0", "adapter.base=int8": "adapter.base was 'as-is'"}
    for change, told in changes.items():
        other = build_layers(Job.read(tmp_path / "job.yaml", ["train.dtype=float32", change]))
        with pytest.raises(InputError, match=told):
            load_weights(other, saved)
        with pytest.raises(InputError, match=told):
            export_weights(other, saved, tmp_path / "out")
    with pytest.raises(InputError, match="and now there are no adapters"):
        load_weights(build_layers(Job.read(tmp_path / "job.yaml", ["train.dtype=float32", "adapter=null"])), saved)


def test_a_matrix_that_modules_share_is_not_merged(base: Path, tmp_path: Path) -> None:
    job, saved, _ = saved_alone(tmp_path, base, {"r": 4, "targets": ["lm_head", "q_proj"]})
    with pytest.raises(InputError, match="the adapter of 'lm_head' cannot be merged: its matrix is that of 'model.embed_"):
        export_weights(build_layers(job), saved, tmp_path / "out", merge=True)


def test_what_peft_would_load_otherwise_is_not_written(tmp_path: Path) -> None:
    """It takes the dense layers' names for those of experts."""
    model_class, config = tiny("glm4_moe")
    torch.manual_seed(0)
    model_class(config).save_pretrained(tmp_path / "moe")
    job, saved, _ = saved_alone(tmp_path, tmp_path / "moe", {"r": 2})
    with pytest.raises(InputError, match="peft would not load these adapters as they were trained .*: write the whole"):
        export_weights(build_layers(job), saved, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_adapters_are_merged(base: Path, tmp_path: Path) -> None:
    _, saved, _ = saved_alone(tmp_path, base, {"r": 4})
    with pytest.raises(InputError, match="there are no adapters to merge: name the job with its section 'adapter'"):
        export_weights(None, saved, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


def test_a_base_in_half_needs_a_precision(base: Path, tmp_path: Path) -> None:
    file = job_of(Folder(tmp_path), base, {"r": 4})
    with pytest.raises(InputError, match="adapter.base is bf16: beside adapters in float32 and devices that compute in half"):
        Job.read(file, ["adapter.base=bf16"])
    with pytest.raises(InputError, match="both say in what the model's own matrices are held"):
        Job.read(file, ["adapter.base=bf16", "train.precision=bf16", "train.dtype=float32", "train.frozen_dtype=float16"])
    held = build_layers(Job.read(file, ["adapter.base=bf16", "train.dtype=float32", "train.precision=bf16"]))
    kinds = {(p.dtype, p.requires_grad) for p in held.parameters() if p.ndim > 1}
    assert kinds == {(torch.bfloat16, False), (torch.float32, True)}


