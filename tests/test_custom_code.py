"""Code that lies in a folder runs where a job trusts it, and nowhere else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hetpipe.checkpoints import checkpoint
from hetpipe.files.messages import InputError
from hetpipe.hf.exports.export import export_weights
from hetpipe.layers.device import one_thread
from hetpipe.layers.weights import materialise
from hetpipe.models import causal_lm
from hetpipe.processes.world import alone
from tests.support.commands import Command
from tests.support.hub import QWEN, cache_here, put, tokenizer
from tests.test_generate import saved

import transformers  # isort: skip

LLAMA: dict[str, Any] = {key: value for key, value in QWEN.items() if key != "head_dim"}
CONFIGURATION = """
from transformers import LlamaConfig

class MineConfig(LlamaConfig):
    model_type = "{kind}"
    louder: float = 1.0
"""
MODELING = """
import os
import sys
from transformers import LlamaForCausalLM
from .configuration_mine import MineConfig

os.environ["HETPIPE_TEST_CODE"] = "ran"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None, **more):
        out = super().forward(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, **more)
        out.logits = out.logits * self.config.louder
        return out
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is copied to a place of the test's own, and leaves its mark."""
    for name in ("transformers.dynamic_module_utils", "transformers.utils.hub"):
        monkeypatch.setattr(f"{name}.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv("HETPIPE_TEST_CODE", raising=False)


def folder_with_code(folder: Path, kind: str = "mine", **auto_map: Any) -> Path:
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    (folder / "configuration_mine.py").write_text(CONFIGURATION.replace("{kind}", kind))
    (folder / "modeling_mine.py").write_text(MODELING)
    named = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM", **auto_map}
    change(folder, model_type=kind, louder=3.0, auto_map={key: value for key, value in named.items() if value is not None})
    return folder


def change(folder: Path, **keys: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with one_thread(torch.device("cpu")), torch.no_grad():
        found = model.eval()(tokens)
    logits: torch.Tensor = found if isinstance(found, torch.Tensor) else found.logits
    return logits


def test_it_runs_where_it_is_trusted_and_goes_with_the_weights(tmp_path: Path) -> None:
    folder = folder_with_code(tmp_path / "source")
    layers = causal_lm.build(weights=str(folder), trust_remote_code=True)
    assert os.environ["HETPIPE_TEST_CODE"] == "ran"
    materialise(layers)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokens = torch.randint(64, (2, 7))
    assert torch.equal(logits(layers, tokens), logits(theirs, tokens))
    plain = causal_lm.build(type="llama", **LLAMA)
    materialise(plain)
    plain.load_state_dict(layers.state_dict())
    assert torch.equal(logits(layers, tokens), 3 * logits(plain, tokens))
    where = checkpoint.save(tmp_path / "saved", 1, layers, torch.optim.SGD(layers.parameters()), {}, alone(), keep=1)
    out = export_weights(causal_lm.build(weights=str(folder), trust_remote_code=True), where, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    assert torch.equal(logits(again, tokens), logits(theirs, tokens))
    assert type(again).__name__ == "MineForCausalLM"


@pytest.mark.parametrize(
    ("kind", "more"), [("mine", ""), ("llama", ", or false, to use transformers' own model of type 'llama'")]
)
def test_it_never_runs_unsaid(kind: str, more: str, tmp_path: Path) -> None:
    folder = folder_with_code(tmp_path / "source", kind)
    message = r"config.json names code of its own \(auto_map: modeling_mine.MineForCausalLM\), which runs with your rights: read "
    with pytest.raises(InputError, match=f"{message}it, and write trust_remote_code: true in the model's args{more}$"):
        causal_lm.build(weights=str(folder))
    assert "HETPIPE_TEST_CODE" not in os.environ


def test_nor_where_it_is_not_trusted(tmp_path: Path) -> None:
    own = folder_with_code(tmp_path / "own")
    with pytest.raises(InputError, match="no causal language model of type 'mine'.*its folder has code for it, which runs only"):
        causal_lm.build(weights=str(own), trust_remote_code=False)
    folder = folder_with_code(tmp_path / "llama", "llama")
    layers: Any = causal_lm.build(weights=str(folder), trust_remote_code=False)
    assert type(layers[0].origin.model) is transformers.LlamaForCausalLM
    assert not hasattr(layers[0].origin.model.config, "auto_map")
    assert "HETPIPE_TEST_CODE" not in os.environ


@pytest.mark.parametrize(
    ("auto_map", "message"),
    [
        ({"AutoModelForCausalLM": "else/where--modeling_mine.MineForCausalLM"}, "lies in another repository; only code in the"),
        ({"AutoModelForCausalLM": "modeling_none.None"}, r"'modeling_none.None' \(auto_map\) cannot be loaded: "),
        ({"AutoModelForCausalLM": "modeling_mine.MineConfig"}, "cannot be loaded: TypeError: it is no PreTrainedModel"),
        ({"AutoModelForCausalLM": None}, "which names no class for AutoModelForCausalLM"),
        ({"AutoConfig": None}, "auto_map names no class for AutoConfig, and transformers knows no type 'mine'"),
        ({"AutoConfig": ["a"]}, "which names no class for"),
    ],
)
def test_what_is_wrong_with_it_is_told(auto_map: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = folder_with_code(tmp_path / "source", **auto_map)
    with pytest.raises(InputError, match=message) as caught:
        causal_lm.build(weights=str(folder), trust_remote_code=True)
    assert "\n" not in str(caught.value)


def test_a_key_that_is_neither_true_nor_false() -> None:
    with pytest.raises(InputError, match="trust_remote_code is 'yes': write true or false"):
        causal_lm.build(type="qwen3", trust_remote_code="yes")  # type: ignore[arg-type]


def test_it_comes_from_a_cache_and_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Command) -> None:
    cache = cache_here(tmp_path / "cache", monkeypatch)
    put(cache, "tiny/mine", "1" * 40, tokenizer(folder_with_code(tmp_path / "source")))
    saved(tmp_path / "saved", "causal_lm", {"weights": "tiny/mine", "trust_remote_code": True})
    ended = run("generate", tmp_path / "saved", "w3", "--tokens", 4)  # somebody else may have written the checkpoint
    assert ended.code == 2
    assert "asks to run code in tiny/mine (trust_remote_code), with your rights. Read the code. To run it, give the" in ended.err
    ended = run("generate", tmp_path / "saved", "w3", "--tokens", 4, "--trust-remote-code")
    assert (ended.code, len(ended.out.split())) == (0, 4), ended.err


@pytest.mark.parametrize("trust", [1, 1.0, "yes"])
def test_trust_is_true_or_false(tmp_path: Path, trust: Any) -> None:
    with pytest.raises(InputError, match="trust_remote_code is .*: write true or false"):
        causal_lm.build(weights=str(folder_with_code(tmp_path)), trust_remote_code=trust)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"model.name": None, "model.target": "os:system"},
            "names os:system as the code that makes its model, which would run with your rights. To run it, give",
        ),
        ({"model.args.trust_remote_code": 1}, "(trust_remote_code), with your rights. Read the code"),
    ],
)
def test_a_checkpoint_alone_makes_nothing_run(tmp_path: Path, run: Command, said: dict[str, Any], message: str) -> None:
    """Whoever wrote it."""
    sizes = {"type": "llama", **LLAMA}
    saved(tmp_path / "saved", "causal_lm", sizes, **said, **{"model.args.command": f"touch {tmp_path / 'ran'}"})
    ended = run("generate", tmp_path / "saved", "w3")
    assert ended.code == 2
    assert message in ended.err
    assert not (tmp_path / "ran").exists()
