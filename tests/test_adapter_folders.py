"""Jobs, checkpoints and folders of adapters: they go on with their own base only, and peft loads them."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hetpipe import load_weights
from hetpipe.building.build import build_layers
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.origin.base import adapter_keys, base_of, pinned_base
from hetpipe.checkpoints.origin.base_numbers import numbers_key, numbers_of_base
from hetpipe.checkpoints.resume import compare, identity
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError
from hetpipe.finetune.facts import model_facts
from hetpipe.hf.exports.export import export_weights
from hetpipe.hf.folder import WeightFolder
from hetpipe.layers.weights import empty_names, materialise, state_of
from hetpipe.models import bert, causal_lm, gpt2, llama, t5
from hetpipe.processes.world import alone
from hetpipe.training.start import run_everywhere, train_rank
from hetpipe.whatif.models import find_model
from tests.support.adapted import KINDS, SIZES, logits, tokens, trained_a_little
from tests.support.jobs import Folder, train
from tests.test_causal_lm import tiny

import transformers  # isort: skip  # offline, as tests.support.zoo sets it


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
        rows=rows,
        counts=[len(row["cuts"]) for row in rows],
        data={"target": "tests.support.adapted:words"},
        adapter=adapter,
        model={"name": "causal_lm", "args": {"weights": str(base), "extras": []}},
        loss={"name": "cross_entropy", "weight": "tokens"},
        checkpoint={"folder": str(folder.path / "saved"), "every_steps": 2},
        train=train(**{"global_batch": 6, "steps": 4, "scheduler": None} | keys),
    )


@pytest.mark.thorough
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


def saved_alone(folder: Path, base: Path, adapter: dict[str, Any], dtype: str = "float32") -> tuple[Job, Path, nn.Sequential]:
    """A job, a checkpoint as its run would leave it, and the model of that."""
    job = Job.read(job_of(Folder(folder), base, adapter, dtype=dtype))
    layers = build_layers(job)
    materialise(layers)
    trained_a_little(layers)
    extra = {"base": base_of(layers), "adapter": adapter_keys(layers), **numbers_key(numbers_of_base(layers, alone()))}
    return job, checkpoint.save(folder / "saved", 1, layers, torch.optim.SGD(layers.parameters()), extra, alone(), keep=1), layers


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_trained_is_loaded_by_peft(kind: str, base: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    job, saved, layers = saved_alone(tmp_path, base, {"r": 4, **KINDS[kind]}, "float64")
    again = build_layers(job)
    load_weights(again, saved)
    ours = logits(layers)
    assert torch.equal(logits(again), ours)
    export_weights(build_layers(job), saved, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["task_type"], config["r"]) == (str(base), "CAUSAL_LM", 4)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of what is saved beside adapters where the head is tied
        loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    if "base" in KINDS[kind]:  # theirs has all its bits; what was trained is there
        theirs = {name.replace(".default", ""): p for name, p in loaded.named_parameters() if "lora_" in name}
        assert len(theirs) == len(state_of(layers))
    else:
        assert (ours - loaded.eval()(tokens()).logits).abs().max() < 1e-10


@pytest.mark.parametrize("kind", ["plain", "nf4, DoRA", "int8", "with norms, embedding, head"])
@pytest.mark.parametrize(("dtype", "shard_bytes"), [(torch.float64, 1 << 30), (torch.bfloat16, 1 << 14)])
def test_merged_it_is_a_model_of_transformers(
    kind: str, dtype: torch.dtype, shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the number type of the base; what few bits held is as it was trained with, and is merged in float32."""
    monkeypatch.setattr("hetpipe.hf.exports.export.SHARD_BYTES", shard_bytes)
    base = folder_of(tmp_path / "base", dtype)
    job, saved, layers = saved_alone(tmp_path, base, {"r": 4, **KINDS[kind]}, "float64")
    empty = build_layers(job)
    out = export_weights(empty, saved, tmp_path / "merged", merge=True)
    assert all(empty_names(layer) for layer in empty)
    assert (len([*out.glob("*.safetensors")]) > 1) == (shard_bytes < 1 << 20)
    wanted, found = WeightFolder(base), WeightFolder(out)
    assert sorted(found) == sorted(wanted)
    assert {found.type_of(name) for name in found} == {dtype}
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64, output_loading_info=True)
    whole, info = loaded
    assert not any(info.values()), info
    ours, theirs = logits(layers), whole.eval()(tokens()).logits
    off = 0.1 if dtype is torch.bfloat16 else 1e-5 if "base" in KINDS[kind] else 1e-10
    assert (ours - theirs).abs().max() < off * ours.abs().max(), "but for the rounding of what was merged"


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

    said = compare(saved, own(f"model.args.weights={tmp_path / 'moved'}"), tmp_path, step=2)
    assert said is not None
    assert "model.args.weights was" in said
    with pytest.raises(InputError, match="the adapters that were saved are of another model: write model.args.weights as it was"):
        compare(saved, own(f"model.args.weights={tmp_path / 'other'}"), tmp_path, step=2)
    for setting, told in (("adapter.r=8", "adapter.r was 4, is 8"), ("adapter=null", "adapter.r was 4, is None")):
        with pytest.raises(InputError, match=told):
            compare(saved, own(setting), tmp_path, step=2)
    assert "adapter.dropout was 0.0, is 0.1" in str(compare(saved, own("adapter.dropout=0.1"), tmp_path, step=2))
    with pytest.raises(InputError, match="was saved with adapters of the model .*, but the model has adapters of the model"):
        export_weights(
            build_layers(Job.read(tmp_path / "job.yaml", [f"model.args.weights={tmp_path / 'other'}"])),
            next((tmp_path / "saved").iterdir()),
            tmp_path / "out",
        )


def test_adapters_are_those_that_were_saved(base: Path, tmp_path: Path) -> None:
    _, saved, _ = saved_alone(tmp_path, base, {"r": 4})
    changes = {"adapter.alpha=320": "adapter.alpha was 32.0, is 320.0", "adapter.base=int8": "adapter.base was 'as-is'"}
    for change, told in changes.items():
        other = build_layers(Job.read(tmp_path / "job.yaml", ["train.dtype=float32", change]))
        with pytest.raises(InputError, match=told):
            load_weights(other, saved)
        with pytest.raises(InputError, match=told):
            export_weights(other, saved, tmp_path / "out")
    with pytest.raises(InputError, match="but the model has no adapters"):
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
    with pytest.raises(InputError, match="does not say to which model its adapters are added: name the job with its section"):
        export_weights(None, saved, tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()


def test_a_base_in_half_needs_a_precision(base: Path, tmp_path: Path) -> None:
    file = job_of(Folder(tmp_path), base, {"r": 4})
    with pytest.raises(
        InputError, match="adapter.base is bf16, which needs adapters in float32 and devices that compute in half"
    ):
        Job.read(file, ["adapter.base=bf16"])
    with pytest.raises(InputError, match="both set the type of the model's own matrices"):
        Job.read(file, ["adapter.base=bf16", "train.precision=bf16", "train.dtype=float32", "train.frozen_dtype=float16"])
    held = build_layers(Job.read(file, ["adapter.base=bf16", "train.dtype=float32", "train.precision=bf16"]))
    kinds = {(p.dtype, p.requires_grad) for p in held.parameters() if p.ndim > 1}
    assert kinds == {(torch.bfloat16, False), (torch.float32, True)}


def test_a_base_that_holds_adapters_is_refused_wherever_it_is_read(base: Path, tmp_path: Path) -> None:
    """transformers would add them, and a chain would be without."""
    both, alone_there = Path(shutil.copytree(base, tmp_path / "both")), tmp_path / "alone"
    alone_there.mkdir()
    for folder in (both, alone_there):
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "owner/model"}))
    write = "write 'adapter: {{weights: {0}}}' (hetpipe finetune: --adapter {0}), with model.args.weights the base that they name"
    beside = f"{both} holds adapters beside the model (adapter_config.json): transformers would add them, and a model read here"
    told = {
        both: [beside, write.format(both), "merge them first (peft's merge_and_unload); for the model alone, take adapter_"],
        alone_there: [f"{alone_there} holds adapters (adapter_config.json), and no model", write.format(alone_there)],
    }
    readers: list[Any] = [
        causal_lm.build,
        gpt2.build,
        bert.build,
        llama.build,
        t5.build,
        lambda weights: find_model(weights),
        lambda weights: model_facts({"name": "causal_lm", "args": {"weights": weights}}),
    ]
    for folder, lines in told.items():
        for reader in readers:
            with pytest.raises(InputError) as caught:
                reader(weights=str(folder))
            assert [line for line in lines if line not in str(caught.value)] == []
    (both / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="with model.args.weights the base, which they do not name"):
        WeightFolder(both)
    assert find_model(str(both / "config.json")).name == str(both / "config.json"), "a file by its name is just that"
