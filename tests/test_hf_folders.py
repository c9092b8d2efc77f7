"""Folders of save_pretrained: older names, missing tensors, pieces, ties; presets and wrong arguments."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hetpipe.cli.weights import export_weights_command
from hetpipe.files.messages import InputError
from hetpipe.files.tensors import TensorFiles
from hetpipe.hf.exports.beside import copy_matching
from hetpipe.layers.transforms import tensors_of
from hetpipe.layers.weights import empty_names, materialise
from hetpipe.models import bert, gpt2, t5
from tests.support.zoo import WORDS, ZOO, transformers_model


def test_an_older_folder_a_bare_base_model_and_what_is_missing(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    base = transformers_model("bert", ZOO["bert"].config).get_submodule("bert")
    assert isinstance(base, PreTrainedModel)
    base.save_pretrained(tmp_path / "base")  # no prefix, no classifier
    state = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t.clone()
        for n, t in base.state_dict().items()
        if "pooler" not in n
    }
    save_file(state, tmp_path / "base" / "model.safetensors")
    layers = ZOO["bert"].build(weights=str(tmp_path / "base"), num_labels=7)
    with pytest.warns(UserWarning, match=r"has no bert.pooler.dense.weight, .* classifier.bias: drawn at random"):
        materialise(layers)
    assert layers[-1].get_parameter("classifier.weight").shape == (7, 32)
    assert torch.equal(
        layers[1].get_parameter("layer.output.LayerNorm.bias"), base.get_parameter("encoder.layer.0.output.LayerNorm.bias")
    )
    with pytest.warns(UserWarning, match=r"has no place for 'encoder.layer.2.attention.output.LayerNorm.beta' \(16 such\): they"):
        shorter = ZOO["bert"].build(weights=str(tmp_path / "base"), num_hidden_layers=2)
    materialise(shorter, 0, 3)
    deeper = ZOO["bert"].build(weights=str(tmp_path / "base"), num_hidden_layers=4)
    with pytest.raises(InputError, match=r"has no 'bert.encoder.layer.3.\S+': it does not hold the weights of a BertForSeq"):
        materialise(deeper, 4, 5)
    with pytest.raises(
        InputError, match=r"embeddings.weight' has shape \(64, 32\), and the model's configuration asks for \(80, 32\)"
    ):
        materialise(ZOO["bert"].build(weights=str(tmp_path / "base"), vocab_size=80), 0, 1)


def test_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    wanted = {"number": torch.tensor(3.0), "rows": torch.arange(35).view(7, 5), "none": torch.empty(0, 3), "row": torch.rand(9)}
    save_file(wanted, tmp_path / "x.safetensors")
    monkeypatch.setattr("hetpipe.files.tensors.PIECE_BYTES", 48)
    files = TensorFiles(dict.fromkeys(wanted, tmp_path / "x.safetensors"))
    for name, tensor in wanted.items():
        assert files.read(name).dtype == tensor.dtype
        assert torch.equal(files.read(name), tensor)


def test_two_different_tensors_are_not_tied(tmp_path: Path) -> None:
    """T5 1.1 saved its head beside its embedding; transformers ties what a configuration says."""
    from safetensors.torch import load_file, save_file

    transformers_model("t5", ZOO["t5"].config).save_pretrained(tmp_path / "t5")
    state = load_file(tmp_path / "t5" / "model.safetensors")
    file, same = (tmp_path / "t5" / "model.safetensors", {**state, "lm_head.weight": state["shared.weight"].clone()})
    save_file(same, file)
    tied = t5.build(weights=str(tmp_path / "t5"))
    assert tied[-1].get_parameter("lm_head.weight") is tied[0].get_parameter("embed_tokens.weight")
    save_file({**state, "lm_head.weight": state["shared.weight"] + 1}, file)
    untied = t5.build(weights=str(tmp_path / "t5"))
    materialise(untied)
    head = untied[-1]
    assert isinstance(head, t5.Head)
    assert torch.equal(head.lm_head.weight, untied[0].get_parameter("embed_tokens.weight") + 1)
    assert "lm_head.weight" in head.stored_names.values()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": "gpt3"}, "gpt2: unknown size 'gpt3'; known: gpt2, gpt2-medium, gpt2-large, gpt2-xl"),
        ({"n_layers": 3}, "gpt2: GPT2Config has no 'n_layers'; did you mean 'n_layer'?"),
        ({"attention": "flash"}, "gpt2: unknown attention 'flash'; known: sdpa, eager"),
        ({"weights": "nowhere"}, "nowhere is no folder of save_pretrained: it has no config.json"),
        ({"weights": "nowhere", "size": "gpt2"}, "gpt2: give size 'gpt2' or weights 'nowhere', whose config.json says the size"),
        ({"add_cross_attention": True}, "gpt2: add_cross_attention is True, which is not supported: there is no encoder here"),
        ({"extras": ["mask"]}, "gpt2: unknown extra 'mask'; known: attention_mask, position_ids"),
        ({"type": "llama"}, "gpt2: GPT2Config has no 'type'"),
        ({"trust_remote_code": True}, "gpt2: GPT2Config has no 'trust_remote_code'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + message):
        gpt2.build(**arguments)


def test_wrong_folders(tmp_path: Path) -> None:
    transformers_model("t5", ZOO["t5"].config).save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="^bert: .* holds a model of type 't5', expected 'bert'"):
        bert.build(weights=str(tmp_path / "t5"))
    (tmp_path / "t5" / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(InputError, match=r"cannot read .*model\.safetensors: "):
        t5.build(weights=str(tmp_path / "t5"))
    (tmp_path / "t5" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"has neither model.safetensors nor model.safetensors.index.json; load it with tran"):
        t5.build(weights=str(tmp_path / "t5"))
    index = {"weight_map": {"shared.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "t5" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"lacks \['model-00001-of-00001.safetensors'\], which its model.safetensors.index.json"):
        t5.build(weights=str(tmp_path / "t5"))


CONFIGS: list[tuple[Any, str]] = [
    ([1, 2], r"config\.json: expected a mapping, found a list"),
    (None, r"config\.json: expected a mapping, found a NoneType"),
    ({"n_embd": -1}, r"config\.json: n_embd is -1; it must be from 1 to 16777216"),
    ({"n_embd": 10**9}, r"config\.json: n_embd is 1000000000; it must be from 1 to 16777216"),
    ({"n_layer": 10**9}, r"config\.json: n_layer is 1000000000; it must be from 1 to 10000"),
    ({"num_labels": 10**9}, r"config\.json: num_labels is 1000000000; it must be from 1 to 131072"),
    ({"n_head": 0}, r"config\.json: n_head is 0; it must be from 1 to 16777216"),
    ({"n_head": 5}, r"config\.json: no model can be built: .*divisible"),
    ({"vocab_size": "x"}, r"config\.json: transformers refuses it: .*'vocab_size' expected int, got str"),
    ({"vocab_size": 10**30}, r"config\.json is not usable: vocab_size: a whole number of about 30 digits"),
    ({"activation_function": "nope"}, r"config\.json: no model can be built: 'nope'"),
    ({"dtype": "nope"}, r"config\.json: transformers refuses it: module 'torch' has no attribute 'nope'"),
    ({"id2label": 5}, r"config\.json: transformers refuses it: "),
    ({"model_type": ["x"]}, r"gpt2: .* holds a model of type \['x'\], expected 'gpt2'"),
]


def test_damaged_and_foreign_configurations(tmp_path: Path) -> None:
    transformers_model("gpt2", ZOO["gpt2"].config).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    whole = file.read_text()
    for change, message in CONFIGS:
        file.write_text(json.dumps({**json.loads(whole), **change} if isinstance(change, dict) else change))
        with pytest.raises(InputError, match=message):
            gpt2.build(weights=str(tmp_path))
    file.write_text(whole[:100])
    with pytest.raises(InputError, match=r"config\.json is not valid JSON: line "):
        gpt2.build(weights=str(tmp_path))
    code = {"_attn_implementation": "someone/kernel", "auto_map": {"AutoModel": "code--Model"}, "trust_remote_code": True}
    file.write_text(json.dumps({**json.loads(whole), **code}))
    attention: Any = gpt2.build(weights=str(tmp_path))[1].get_submodule("block.attn")
    assert attention.config._attn_implementation == "sdpa"


def test_all_files_of_a_tokenizer_are_handed_on(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", extra_special_tokens=["[ME]"])
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    written = {Path(file) for file in tokenizer.save_pretrained(tmp_path / "source")}
    older = (
        "added_tokens.json",
        "special_tokens_map.json",
        "vocab.json",
        "merges.txt",
        "spiece.model",
        "source.spm",
        "bpe.codes",
        "dict.txt",
        "target_vocab.json",
        "chat_template.json",
    )
    for name in older:
        (tmp_path / "source" / name).write_text("{}")
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "training_args.bin"):
        (tmp_path / "source" / name).write_text("{}")
    (tmp_path / "target").mkdir()
    copy_matching(tmp_path / "source", tmp_path / "target")
    found = {path.relative_to(tmp_path / "target").as_posix() for path in (tmp_path / "target").rglob("*") if path.is_file()}
    wanted = {path.relative_to(tmp_path / "source").as_posix() for path in written if path.is_file()}
    assert {"chat_template.jinja", "additional_chat_templates/tools.jinja", "tokenizer.json", "tokenizer_config.json"} <= wanted
    assert found == wanted | {*older}
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "target")
    assert again.chat_template == tokenizer.chat_template


@pytest.mark.parametrize("arguments", [{"n_embd": -4}, {"n_layer": 10**9}, {"n_head": 5}, {"vocab_size": "x"}])
def test_absurd_arguments_are_named(arguments: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(arguments)) + "|divisible"):
        gpt2.build(**arguments)


@pytest.mark.parametrize("name", ["/etc/passwd", "../x.safetensors", "..", "sub/x.safetensors", "", 5, None])
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, name: Any) -> None:
    folder = tmp_path / "folder"
    transformers_model("gpt2", ZOO["gpt2"].config).save_pretrained(folder)
    (folder / "model.safetensors").rename(tmp_path / "x.safetensors")
    (folder / "sub").mkdir()
    (folder / "sub" / "x.safetensors").symlink_to(tmp_path / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"transformer.wte.weight": name}}))
    with pytest.raises(InputError, match=r"index\.json(: weight_map says that 'transf| has no weight_map)|lacks \[''\]"):
        gpt2.build(weights=str(folder))
    # what a cache links to lies elsewhere, and is of the folder all the same
    (folder / "model-1.safetensors").symlink_to(tmp_path / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"transformer.wte.weight": "model-1.safetensors"}}')
    materialise(gpt2.build(weights=str(folder)), 0, 0)


@pytest.mark.parametrize("weights", ["~nobody-of-this-name/x", "x" * 5_000, "a\0b"])
def test_names_that_no_folder_has(weights: str) -> None:
    with pytest.raises(InputError, match="is no folder of save_pretrained"):
        gpt2.build(weights=weights)


def test_the_code_in_the_readme_of_models_runs(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parent.parent / "models" / "README.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "block.py").write_text(block)
    filled = runpy.run_path(str(tmp_path / "block.py"))
    assert not any(empty_names(layer) for layer in filled["layers"])


def test_a_sample_longer_than_the_positions() -> None:
    layers = gpt2.build(**ZOO["gpt2"].config)
    materialise(layers, 0, 1)
    words = torch.randint(WORDS, (1, 17))
    with pytest.raises(ValueError, match=r"^gpt2: a sample has 17 tokens, the model's n_positions is 16: shorten the samples$"):
        layers[0](words)
    packed = gpt2.build(**ZOO["gpt2"].config, extras=["position_ids"])
    materialise(packed, 0, 1)
    assert packed[0]((words, torch.arange(17)[None] % 10))[0].shape == (1, 17, 32), "two samples in a row, each short enough"


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)],
)
def test_presets_have_the_published_sizes(size: str, parameters: int) -> None:
    layers = gpt2.build(size)
    assert sum(p.numel() for p in layers.parameters()) == parameters
    assert all(t.is_meta for t in tensors_of(layers).values())


def test_the_command_names_what_is_missing(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    text = "format: hetpipe.job/1\nmodel: {name: mlp}\ndata: {name: text}\ntrain: {global_batch: 2, steps: 1}\n"
    job.write_text(text)
    with pytest.raises(InputError, match=r"job.yaml has no section 'checkpoint', so nothing was saved; name one with --check"):
        export_weights_command(tmp_path / "out", job)
    job.write_text(f"{text}checkpoint: {{folder: {tmp_path / 'none'}}}\n")
    with pytest.raises(InputError, match=r"none \(checkpoint.folder of .*\) holds no checkpoint \(from .*\); train first"):
        export_weights_command(tmp_path / "out", job)
    with pytest.raises(InputError, match=r"^name a job, or a checkpoint with --checkpoint$"):
        export_weights_command(tmp_path / "out")
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(InputError, match=r"step-00000001 is no checkpoint and holds no checkpoints \(folders step-… with"):
        export_weights_command(tmp_path / "out", job, checkpoint=tmp_path / "step-00000001")
    assert not (tmp_path / "out").exists()
