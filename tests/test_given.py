"""Adapters that go on from a folder of peft: as peft has them, whatever a rank holds; and what cannot go on, by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import hetpipe
from hetpipe import adapt
from hetpipe.files.messages import InputError
from hetpipe.layers.adapters.adapt import adapter_of
from hetpipe.layers.model import cross_entropy
from hetpipe.layers.weights import empty_names, state_of
from hetpipe.models import causal_lm
from tests.support.adapted import SIZES, tokens
from tests.support.hub import FIRST, cache_here, put
from tests.support.peft_folders import BASES, base_of, chain_of, changed, logits_by_stages, peft_folder, plain, with_peft
from tests.support.ranks import make_plan

ATTENTION = {"gpt2": "c_attn", "phi3": "qkv_proj"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: base_of(name, folder / name) for name in BASES}


def configs(name: str) -> dict[str, dict[str, Any]]:
    """What users of peft write; of one base all of it, of the others what is theirs."""
    one, embedding = ATTENTION.get(name, "q_proj"), "wte" if name == "gpt2" else "embed_tokens"
    layers, inside = ("h", "transformer") if name == "gpt2" else ("layers", "model")
    norms = ["ln_1", "ln_2", "ln_f"] if name == "gpt2" else ["norm"]
    some: dict[str, dict[str, Any]] = {
        "names": {"target_modules": [one]},
        "all linear, DoRA": {"target_modules": "all-linear", "use_dora": True},
        "rsLoRA": {"target_modules": [one], "use_rslora": True, "lora_alpha": 3},
        "a regular expression": {"target_modules": rf".*\.{layers}\.[02]\..*{one}", "init_lora_weights": "gaussian"},
        "some layers": {"target_modules": [one], "layers_to_transform": [1], "layers_pattern": layers},
        "all but one layer": {"target_modules": [one], "exclude_modules": rf"{inside}\.{layers}\.0\..*"},
        "one module": {"target_modules": [f"{layers}.1.{'attn' if name == 'gpt2' else 'self_attn'}.{one}"]},
        "embedding and head": {"target_modules": [embedding, "lm_head"]},
        "norms too": {"target_modules": [one], "modules_to_save": norms},
        "patterns that say nothing": {"target_modules": [one], "rank_pattern": {one: 4}, "alpha_pattern": {one: 8}},
    }
    saved = {"target_modules": [one], "modules_to_save": [embedding]}
    whole: dict[str, dict[str, Any]] = {"embedding too": saved, "both too": saved | {"modules_to_save": [embedding, "lm_head"]}}
    if name == "llama":
        return some | whole
    some = {case: some[case] for case in ("all linear, DoRA", "a regular expression", "embedding and head", "norms too")}
    return some | ({"a tied matrix too": saved | {"ensure_weight_tying": True}} if name == "tied" else {})


@pytest.mark.parametrize("name", BASES)
def test_they_give_the_logits_of_peft(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """In float64, over two stages that each read their own."""
    misses, base = {}, plain(bases[name]).eval()(tokens()).logits
    for case, config in configs(name).items():
        folder = peft_folder(bases[name], tmp_path / case, **config)
        theirs = with_peft(plain(bases[name]), folder).eval()(tokens()).logits
        ours = logits_by_stages(lambda folder=folder: chain_of(bases[name], folder))  # type: ignore[misc]
        off, moved = (ours - theirs).abs().max(), (ours - base).abs().max()
        if not off < 1e-10 or not moved > 1e-3:
            misses[case] = (float(off), float(moved))
    assert not misses


@pytest.mark.parametrize(
    "config", [{"use_dora": True, "modules_to_save": ["norm"]}, {"modules_to_save": ["embed_tokens", "lm_head"]}]
)
def test_a_run_from_them_is_that_of_peft(config: dict[str, Any], bases: dict[str, Path], tmp_path: Path) -> None:
    """Some steps of AdamW, in float64, on one device."""
    folder = peft_folder(bases["llama"], tmp_path / "adapter", target_modules="all-linear", lora_alpha=6, **config)
    draw = torch.Generator().manual_seed(5)
    inputs, targets = (torch.randint(64, (6, 9), generator=draw) for _ in range(2))
    model = with_peft(plain(bases["llama"]), folder, is_trainable=True)
    theirs = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    layers = chain_of(bases["llama"], folder)
    engine = hetpipe.wrap(layers, make_plan([{"cuts": [5], "sizes": [2, 4]}]), inputs, cross_entropy, loss_weight="tokens")
    ours = torch.optim.AdamW((p for p in engine.parameters() if p.requires_grad), lr=0.01)
    for _ in range(4):
        theirs.zero_grad()
        loss = cross_entropy(model(inputs).logits, targets)
        loss.backward()
        theirs.step()
        assert abs(engine.step(inputs, targets) - loss.item()) < 1e-10
        ours.step()
    with torch.no_grad():
        assert (layers.eval()(inputs) - model.eval()(inputs).logits).abs().max() < 1e-10


@pytest.fixture(scope="module")
def made(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of q_proj and v_proj with r 4, alpha 8 and dropout 0.1."""
    folder = tmp_path_factory.mktemp("made") / "adapter"
    return peft_folder(bases["llama"], folder, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def go_on(bases: dict[str, Path], folder: Path | str, name: str = "llama", **options: Any) -> nn.Sequential:
    return adapt(causal_lm.build(weights=str(bases[name]), extras=[]), weights=str(folder), **options)


def test_what_is_said_beside_the_folder_is_the_same_or_refused(bases: dict[str, Path], made: Path) -> None:
    """In other words, too; another dropout may be said, and the base is the job's own choice."""
    said: dict[str, Any] = {"r": 4, "alpha": 8, "use_dora": False, "rank_stabilized": False, "train_also": []}
    by_name = ["model.layers.0.self_attn.q_proj", "v_proj", "layer1.q_proj", "layer2.layer.self_attn.q_proj"]
    for targets in (None, ["v_proj", "q_proj"], by_name):
        more: dict[str, Any] = said if targets is None else said | {"targets": targets}
        section = adapter_of(go_on(bases, made, base="int8", dropout=0.3, **more))
        assert section is not None
        assert (section.dropout, section.base, section.r) == (0.3, "int8", 4)
        assert section.targets == tuple(targets or ("q_proj", "v_proj"))
    section = adapter_of(go_on(bases, made))
    assert section is not None
    assert section.dropout == 0.1
    others: dict[str, Any] = {
        "r": 8,
        "alpha": 16.0,
        "use_dora": True,
        "rank_stabilized": True,
        "train_also": ["norms"],
        "targets": "all-linear",
    }
    with pytest.raises(InputError) as caught:
        go_on(bases, made, **others)
    assert f"adapter.weights: {made} says it otherwise; leave it out, or write what is there:" in str(caught.value)
    for line in (
        "adapter.r is 8, and there 4",
        "adapter.alpha is 16.0, and there 8.0",
        "use_dora is True, and there False",
        "adapter.rank_stabilized is True, and there False",
        "adapter.train_also is ('norms',), and there ()",
        "adapter.targets is 'all-linear', and there ('q_proj', 'v_proj')",
    ):
        assert line in str(caught.value)
    with pytest.raises(InputError, match=r"adapter.targets is \('q_proj',\), and there \('q_proj', 'v_proj'\)"):
        go_on(bases, made, targets=["q_proj"])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "peft_type": ({"peft_type": "IA3"}, "peft_type is 'IA3': only LORA trains here"),
    "rank_pattern": ({"rank_pattern": {"q_proj": 2}}, r"rank_pattern is {'q_proj': 2}: all adapters have one rank here"),
    "alpha_pattern": ({"alpha_pattern": {"q_proj": 2}}, r"alpha_pattern is {'q_proj': 2}: all adapters have one alpha here"),
    "bias": ({"bias": "lora_only"}, "bias is 'lora_only': only matrices train beside adapters, and what train_also names"),
    "lora_bias": ({"lora_bias": True}, "lora_bias is True: adapters have no bias here"),
    "target_parameters": ({"target_parameters": ["a.b"]}, r"target_parameters is \['a.b'\]: adapters are beside modules here"),
    "trainable_token_indices": ({"trainable_token_indices": [1]}, r"trainable_token_indices is \[1\]: an embedding trains as a"),
    "alora": ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens is \[1\]: an adapter is in use for all tokens here"),
    "replication": ({"layer_replication": [[0, 2]]}, r"layer_replication is \[\[0, 2\]\]: layers stand in a chain once"),
    "pissa": ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa': such adapters are beside another base, from whose"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora': such adapters are beside another base"),
    "corda": ({"init_lora_weights": "corda"}, "init_lora_weights is 'corda': such adapters are beside another base"),
    "loftq": ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq': such adapters are beside another base"),
    "mica": ({"init_lora_weights": "mica"}, "init_lora_weights is 'mica': of such adapters one of the two matrices does"),
    "later": ({"use_tomorrow": 3}, "use_tomorrow is 3: what it does is not known here; where it does nothing, take"),
    "no r": ({"r": None}, "adapter_config.json in .* says no r"),
    "r": ({"r": "many"}, r"adapter_config.json in .*: 1 fault\(s\) in this configuration of adapters\n  r: .*'many'"),
    "another r": ({"r": 8}, r"lora_A.weight of .*q_proj' has shape \[4, 32\]; beside this module, with r 8, it is \[8, 32\]"),
    "DoRA": ({"use_dora": True}, "'model.layers.0.self_attn.q_proj' has no lora_magnitude_vector"),
    "more targets": (
        {"target_modules": ["q_proj", "v_proj", "o_proj"]},
        "'model.layers.0.self_attn.o_proj' has no tensors, and is one of the target_modules in adapter_config.json",
    ),
    "more saved": ({"modules_to_save": ["lm_head"]}, "'lm_head.weight' is not there, and is one of the modules_to_save"),
}


def test_what_peft_can_do_and_hetpipe_cannot_is_refused_by_name(bases: dict[str, Path], copy: Path) -> None:
    config, misses = (copy / "adapter_config.json").read_text(), []
    for name, (keys, told) in REFUSED.items():
        changed(copy, config=lambda said, keys=keys: said.update(keys))  # type: ignore[misc]
        try:
            with pytest.raises(InputError, match=told):
                go_on(bases, copy)
        except BaseException as error:
            misses.append((name, str(error)))
        (copy / "adapter_config.json").write_text(config)
    assert not misses
    go_on(bases, copy)


FIRST_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DAMAGED: dict[str, tuple[Any, str | None]] = {
    "another module": (
        lambda held: held.update({FIRST_A.replace("q_proj", "z_proj"): held.pop(FIRST_A)}),
        r"self_attn.z_proj' is no module of the model\n(.*\n)*\(in the model names are as in 'model.layers",
    ),
    "one part": (lambda held: held.pop(FIRST_A), "'model.layers.0.self_attn.q_proj' has no lora_A.weight"),
    "one more": (
        lambda held: held.update({FIRST_A.replace("lora_A", "lora_C"): torch.zeros(1)}),
        "'model.layers.0.self_attn.q_proj' has lora_C.weight, which is none of what adapter_config.json says",
    ),
    "a shape": (
        lambda held: held.update({FIRST_A: torch.zeros(4, 16)}),
        r"lora_A.weight of .*0.self_attn.q_proj' has shape \[4, 16\]; beside this module, with r 4, it is \[4, 32\]",
    ),
    "no prefix": (lambda held: held.update({"adapter.x": torch.zeros(1)}), "'adapter.x' does not begin with base_model.model."),
    "no number": (lambda held: held[FIRST_A].fill_(torch.nan), f"'{FIRST_A}' in .* holds infinite numbers, or such as are no"),
    "whole numbers": (lambda held: held.update({FIRST_A: torch.zeros(4, 32, dtype=torch.int8)}), "is of torch.int8, and an ada"),
    "another tensor": (
        lambda held: held.update({"base_model.model.model.other.weight": torch.zeros(2)}),
        "'model.other.weight' is no tensor of the model",
    ),
    "another vocabulary": (
        lambda held: held.update({"base_model.model.lm_head.weight": torch.zeros(70, 32)}),
        r"'lm_head.weight' has shape \[70, 32\], in the model \[64, 32\]",
    ),
    "another base": (
        lambda held: held.update({"base_model.model.lm_head.weight": torch.zeros(64, 32)}),
        "'lm_head.weight', which did not train, has other numbers than in this model: it was another base",
    ),
    "nothing": (lambda held: held.clear(), "'model.layers.0.self_attn.q_proj' has no tensors"),
    "a norm": (lambda held: held.update({"base_model.model.model.norm.weight": torch.ones(32)}), None),  # as the base has it
}


def test_what_does_not_fit_is_told_before_anything_is_measured(bases: dict[str, Path], made: Path, tmp_path: Path) -> None:
    misses = []
    for name, (damage, told) in DAMAGED.items():
        folder = changed(Path(shutil.copytree(made, tmp_path / name)), tensors=damage)
        try:
            if told is None:
                go_on(bases, folder)
                continue
            with pytest.raises(InputError, match=told):
                go_on(bases, folder)
        except BaseException as error:
            misses.append((name, str(error)))
    assert not misses


def test_a_matrix_of_embedding_and_head_stays_one(bases: dict[str, Path], tmp_path: Path) -> None:
    """peft trains two of it, or one of its two places, unless it is told otherwise."""
    modules, told = {"target_modules": ["q_proj"]}, "they are one matrix in this model; take a base in which they are two"
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "one": ({"modules_to_save": ["embed_tokens"]}, "embed_tokens.weight' trained as a whole, and 'lm_head.weight' did not"),
        "both": ({"modules_to_save": ["embed_tokens", "lm_head"]}, "'lm_head.weight' and 'model.embed_tokens.weight' .* apart"),
    }
    for name, (config, what) in cases.items():
        with pytest.raises(InputError, match=f"{what}: {told}"):
            go_on(bases, peft_folder(bases["tied"], tmp_path / name, **modules, **config), "tied")
    alike = peft_folder(bases["tied"], tmp_path / "adapted", target_modules=["embed_tokens"], ensure_weight_tying=True)
    with pytest.raises(InputError, match="the adapter of 'model.embed_tokens' is also that of the head"):
        go_on(bases, alike, "tied")


def test_what_trains_as_a_whole_is_of_a_kind(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = peft_folder(bases["llama"], tmp_path / "one", target_modules=["q_proj"], modules_to_save=["model.norm", "1.mlp"])
    with pytest.raises(InputError, match="trained as a whole, which here all embeddings, the head, or all norms do") as caught:
        go_on(bases, folder)
    assert "'model.norm.weight' trained" in str(caught.value)
    assert "'model.layers.1.mlp.up_proj.weight' trained" in str(caught.value)


def test_an_embedding_gets_no_dora(bases: dict[str, Path], tmp_path: Path) -> None:
    folder = peft_folder(bases["llama"], tmp_path / "one", target_modules=["embed_tokens", "q_proj"], use_dora=True)
    with pytest.raises(InputError, match="'model.embed_tokens' is an embedding: use_dora is for linear layers here"):
        go_on(bases, folder)


def test_another_model_is_told(bases: dict[str, Path], made: Path) -> None:
    with pytest.raises(InputError, match="'model.layers.0.self_attn.q_proj' is no module of the model"):
        go_on(bases, made, "gpt2")
    with pytest.raises(InputError, match=r"has shape \[16, 4\]; beside this module, with r 4, it is"):
        adapt(causal_lm.build(type="qwen3", **SIZES | {"num_key_value_heads": 4}), weights=str(made))
    with pytest.raises(InputError, match="is no module of the model"):
        adapt(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), weights=str(made))


def test_what_is_no_folder_of_peft_is_told(bases: dict[str, Path], copy: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere is no folder of peft: it has no adapter_config.json, and no name of a model"):
        go_on(bases, tmp_path / "nowhere")
    with pytest.raises(InputError, match="is no folder of peft: it has no adapter_config.json: it holds 'copy', of which one"):
        go_on(bases, tmp_path)
    (copy / "adapter_model.safetensors").rename(copy / "adapter_model.bin")
    with pytest.raises(InputError, match="has adapter_model.bin, which runs whatever code is in it when it is read, and no ada"):
        go_on(bases, copy)
    (copy / "adapter_model.bin").rename(copy / "other")
    with pytest.raises(InputError, match="has no adapter_model.safetensors: load it with peft, and save it again"):
        go_on(bases, copy)
    (copy / "adapter_model.safetensors").write_bytes(b"?")
    with pytest.raises(InputError, match="cannot read .*adapter_model.safetensors"):
        go_on(bases, copy)
    (copy / "adapter_config.json").write_text("[1]")
    with pytest.raises(InputError, match="adapter_config.json: expected a mapping, found a list"):
        go_on(bases, copy)


def test_a_name_on_hugging_face_is_a_folder_of_its_cache(
    bases: dict[str, Path], made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    put(cache_here(tmp_path / "cache", monkeypatch), "tiny/adapter", FIRST, made, "old")
    layers = go_on(bases, "tiny/adapter@old")
    assert state_of(layers).keys() == state_of(go_on(bases, made)).keys()
    with pytest.raises(InputError, match="tiny/none is no folder here, and it is not .* in huggingface_hub's cache"):
        go_on(bases, "tiny/none")


def test_adapters_on_the_meta_device_are_those_of_a_model_with_values(bases: dict[str, Path], tmp_path: Path) -> None:
    from hetpipe.layers.weights import materialise

    folder = peft_folder(bases["llama"], tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=["norm", "lm_head"])
    empty, full = go_on(bases, folder), causal_lm.build(weights=str(bases["llama"]), extras=[])
    assert all(empty_names(layer) for layer in empty)
    materialise(full)
    full = adapt(full, weights=str(folder))
    materialise(empty)
    held = load_file(folder / "adapter_model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(state_of(empty).values(), state_of(full).values(), strict=True))
    assert torch.equal(state_of(full)["head.lm_head.weight"], held["base_model.model.lm_head.weight"])
