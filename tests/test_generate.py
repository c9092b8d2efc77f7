"""`hetpipe generate`: what transformers' own model with the checkpoint's weights writes, or one line that says why not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hetpipe.building.build import build_layers
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.origin.base import pinned_base
from hetpipe.checkpoints.resume import identity
from hetpipe.documents.job import Job
from hetpipe.language.tokenizer import Tokenizer
from hetpipe.language.writing.template import Template
from hetpipe.layers.weights import materialise
from hetpipe.planning import registry
from hetpipe.processes.world import alone
from tests.support.commands import Command
from tests.support.hub import TEXT_WORDS, cache_here, qwen, tokenizer
from tests.support.jobs import STATE
from tests.support.zoo import ZOO, transformers_model

import transformers  # isort: skip  # offline, as tests.support.zoo sets it

PROMPT = [3, 5, 9]


def saved(folder: Path, name: str, args: dict[str, Any], state: Any = None, **more: Any) -> Path:
    """A checkpoint as a job's run leaves one."""
    layers = registry.model(name)(**args)
    materialise(layers)
    job = {"model.name": name, **{f"model.args.{key}": value for key, value in args.items()}, **more}
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    return checkpoint.save(folder, 1, layers, optimizer, {**STATE, "job": job, **(state or {})}, alone(), keep=1)


def text(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Path]:
    """The weights' folder, which has a tokenizer, and a folder of checkpoints."""
    source = tokenizer(qwen(tmp_path / "source"))
    saved(tmp_path / "saved", "causal_lm", {"weights": str(source)})
    return source, tmp_path / "saved"


@pytest.mark.parametrize("base", ["as-is", "nf4"])
def test_a_model_with_adapters_writes_what_it_was_trained_to(base: str, tmp_path: Path, run: Command) -> None:
    source = tokenizer(qwen(tmp_path / "source"))
    job = Job.parse(
        {
            "format": "hetpipe.job/1",
            "model": {"name": "causal_lm", "args": {"weights": str(source), "extras": []}},
            "adapter": {"r": 2, "base": base},
            "data": {"name": "text"},
            "train": {"global_batch": 2, "steps": 1, "seed": 3},
        },
        "this test",
    )
    layers = build_layers(job)
    materialise(layers)
    trained = [p for p in layers.parameters() if p.requires_grad]
    torch.manual_seed(0)
    for parameter in trained:
        parameter.data += torch.randn_like(parameter)
    extra = {**STATE, "job": identity(job) | pinned_base(layers)}
    checkpoint.save(tmp_path / "saved", 1, layers, torch.optim.SGD(trained, lr=0.1), extra, alone(), keep=1)
    words = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(4):
            words = torch.cat([words, layers.eval()(words)[:, -1:].argmax(-1)], 1)
    ended = run("generate", tmp_path / "saved", text(PROMPT), "--tokens", 4)
    assert (ended.code, ended.out) == (0, f"{text(words[0, 3:].tolist())}\n"), ended.err


@pytest.mark.parametrize("where", ["saved", "saved/step-00000001", "job.yaml"])
def test_it_writes_what_transformers_does(where: str, trained: tuple[Path, Path], tmp_path: Path, run: Command) -> None:
    source, folder = trained
    job = {
        "format": "hetpipe.job/1",
        "model": {"name": "causal_lm", "args": {"weights": str(source)}},
        "data": {"name": "text"},
        "train": {"global_batch": 2, "steps": 1},
        "checkpoint": {"folder": str(folder)},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    model: Any = transformers.Qwen3ForCausalLM.from_pretrained(source)
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False)[0, 3:].tolist()
    ended = run("generate", tmp_path / where, text(PROMPT), "--tokens", 6)
    assert (ended.code, ended.out) == (0, f"{text(out)}\n"), ended.err
    before = run("generate", source, text(PROMPT), "--tokens", 6)
    assert (before.code, before.out) == (0, ended.out), "the base itself, which is what was saved here"
    found = json.loads(run("generate", tmp_path / where, text(PROMPT), "--tokens", 6, "--json").out)
    assert found == {"checkpoint": str(folder / "step-00000001"), "prompt": text(PROMPT), "text": text(out), "tokens": 6}


def likeliest(folder: Path, count: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    """Token by token."""
    model: Any = transformers.Qwen3ForCausalLM.from_pretrained(folder)
    words = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            words = torch.cat([words, model(words).logits[:, -1:].argmax(-1)], 1)
    return words[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 20.0},
        {"no_repeat_ngram_size": 1},
        {"num_beams": 4, "length_penalty": 3.0},
        {"suppress_tokens": [*range(100)]},
        {"do_sample": True, "temperature": 5.0, "top_k": 3},
        {"encoder_no_repeat_ngram_size": 1},
        {"sequence_bias": [[[7], 100.0]]},
        {"forced_eos_token_id": 9},
        {"min_new_tokens": 6, "eos_token_id": 4},
        {"exponential_decay_length_penalty": [1, 9.0], "eos_token_id": 4},
        {"guidance_scale": 3.0},
    ],
    ids=str,
)
def test_the_likeliest_is_written_whatever_the_model_says_of_how_to_draw(
    settings: dict[str, Any], trained: tuple[Path, Path], run: Command
) -> None:
    source, folder = trained
    (source / "generation_config.json").write_text(json.dumps(settings))
    wanted = likeliest(source, 6)
    ended = run("generate", folder, text(PROMPT), "--tokens", 6)
    assert (ended.code, ended.out) == (0, f"{text(wanted)}\n"), ended.err


@pytest.mark.parametrize("known", [None, 1, [2, 9]])
def test_it_ends_where_answers_end_that_were_learned(known: Any, tmp_path: Path, run: Command) -> None:
    source = tokenizer(qwen(tmp_path / "source"))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": known}))
    wanted = likeliest(source, 6)
    end = next(i for i in range(1, 6) if wanted[i] not in wanted[:i])
    digest = Tokenizer(str(source)).digest
    saved(
        tmp_path / "saved",
        "causal_lm",
        {"weights": str(source)},
        state={"data": {"samples": 3, "tokenizer": digest, "ends": [wanted[end]]}},
    )
    found = json.loads(run("generate", tmp_path / "saved", text(PROMPT), "--tokens", 6, "--json").out)
    assert (found["text"], found["tokens"]) == (text(wanted[:end]), end + 1)


def test_a_base_that_was_moved_is_named_by_the_job(trained: tuple[Path, Path], tmp_path: Path, run: Command) -> None:
    """There was no way to say where it is."""
    source, folder = trained
    wanted = run("generate", folder, text(PROMPT), "--tokens", 6).out
    moved = source.rename(tmp_path / "moved")
    job = {
        "format": "hetpipe.job/1",
        "model": {"name": "causal_lm", "args": {"weights": str(moved)}},
        "data": {"name": "text"},
        "train": {"global_batch": 2, "steps": 1},
        "checkpoint": {"folder": str(folder)},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert f"{source} is no folder of save_pretrained" in refusal(run, folder, text(PROMPT))
    assert run("generate", tmp_path / "job.yaml", text(PROMPT), "--tokens", 6).out == wanted


def test_a_prompt_that_is_written_otherwise_than_in_training_is_told(tmp_path: Path, run: Command) -> None:
    source = tokenizer(qwen(tmp_path / "source"))
    digests = {"samples": 3, "tokenizer": Tokenizer(str(source)).digest}
    digests["template"] = Template(Tokenizer(str(source))).digest
    saved(tmp_path / "chats", "causal_lm", {"weights": str(source)}, state={"data": digests})
    saved(tmp_path / "texts", "causal_lm", {"weights": str(source)}, state={"data": {**digests, "template": None}})
    told = {
        (name, more): run("generate", tmp_path / name, "w3", "--tokens", 1, *more).err
        for name in ("chats", "texts")
        for more in ((), ("--chat",))
    }
    assert "note: the run was trained on chats; --chat writes the prompt as one" in told["chats", ()]
    said = "note: the run was trained without a template of chats, and --chat writes the prompt by one"
    assert said in told["texts", ("--chat",)]
    assert "note" not in told["chats", ("--chat",)] + told["texts", ()]


def test_a_template_is_told_whether_to_think(tmp_path: Path, run: Command) -> None:
    source = tokenizer(qwen(tmp_path / "source"))
    (source / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %} w7 w8{% endif %}"
    )
    saved(tmp_path / "saved", "causal_lm", {"weights": str(source)})
    plain, without = (f"{text(written)}\n" for written in (likeliest(source, 4), likeliest(source, 4, (*PROMPT, 7, 8))))
    assert plain != without
    asked = ("generate", tmp_path / "saved", text(PROMPT), "--tokens", 4, "--chat")
    assert [run(*asked, *more).out for more in ((), ("--thinking", "on"), ("--thinking", "off"))] == [plain, plain, without]
    saved(tmp_path / "off", "causal_lm", {"weights": str(source)}, **{"data.args.thinking": "off"})
    asked = ("generate", tmp_path / "off", text(PROMPT), "--tokens", 4, "--chat")
    assert [run(*asked, *more).out for more in ((), ("--thinking", "on"))] == [without, plain]
    assert "give --chat, too" in refusal(run, tmp_path / "saved", "w3", "--thinking", "off")


def test_a_chat_and_what_is_drawn(trained: tuple[Path, Path], run: Command) -> None:
    source, folder = trained
    model: Any = transformers.Qwen3ForCausalLM.from_pretrained(source)
    out = model.generate(torch.tensor([[1, *PROMPT, 2]]), max_new_tokens=6, do_sample=False)[0, 5:].tolist()
    assert run("generate", folder, text(PROMPT), "--tokens", 6, "--chat").out == f"{text(out)}\n"
    drawn = [run("generate", folder, text(PROMPT), "--temperature", 2, "--seed", seed).out for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0].split()) == 40


def test_gpt2_does_and_its_words_may_come_from_elsewhere(tmp_path: Path, run: Command) -> None:
    saved(tmp_path / "saved", "gpt2", ZOO["gpt2"].config)
    words = tokenizer(tmp_path / "words", 64)
    ended = run("generate", tmp_path / "saved", "w3 w4", "--tokens", 5, "--tokenizer", words)
    assert (ended.code, len(ended.out.split())) == (0, 5), ended.err
    saved(tmp_path / "other", "gpt2", ZOO["gpt2"].config, **{"data.args.tokenizer": str(words)})
    assert run("generate", tmp_path / "other", "w3 w4", "--tokens", 5).out == ended.out


def refusal(run: Command, *words: object) -> str:
    ended = run("generate", *words)
    assert (ended.code, ended.out) == (2, ""), ended.err
    assert "Traceback" not in ended.err
    return ended.err.splitlines()[-1]


def test_a_tokenizer_that_is_missing_damaged_or_anothers(
    trained: tuple[Path, Path], tmp_path: Path, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = trained
    cache_here(tmp_path / "cache", monkeypatch)
    wrong = tokenizer(tmp_path / "wrong", 2 * TEXT_WORDS)
    assert "the prompt has token 300, and the model knows 256 tokens. Name the right" in refusal(
        run, folder, "w3 w300", "--tokenizer", wrong
    )
    assert f"{tmp_path} holds no tokenizer. Name one with --tokenizer" in refusal(run, folder, "w3", "--tokenizer", tmp_path)
    assert "tiny/none is no folder here, and it is not" in refusal(run, folder, "w3", "--tokenizer", "tiny/none")
    (source / "tokenizer.json").write_text("{")
    assert "the tokenizer beside the model's weights cannot be read: " in refusal(run, folder, "w3")
    for file in source.glob("*"):
        if file.name not in ("config.json", "model.safetensors", "generation_config.json"):
            file.unlink()
    assert "the model's weights came from no folder with a tokenizer. Name one with --tokenizer" in refusal(run, folder, "w3")


def test_a_prompt_that_is_none_too_long_or_no_chat(trained: tuple[Path, Path], run: Command) -> None:
    source, folder = trained
    assert "the prompt has no tokens: write some words" in refusal(run, folder, "")
    assert "the prompt has 3 tokens, and --tokens is 62. Together they are more than the model's 64 positions" in refusal(
        run, folder, text(PROMPT), "--tokens", 62
    )
    (source / "chat_template.jinja").write_text("{{ raise_exception('no user here') }}")
    assert "template of chats does not take the prompt: no user here" in refusal(run, folder, "w3", "--chat")
    (source / "chat_template.jinja").unlink()
    assert "this tokenizer has no template of chats. Leave --chat out" in refusal(run, folder, "w3", "--chat")


def test_what_is_no_language_model_or_no_run(tmp_path: Path, run: Command) -> None:
    mlp = {"layers": 2, "width": 4, "inputs": 3, "outputs": 2}
    saved(tmp_path / "mlp", "mlp", mlp)
    assert "and no causal language model" in refusal(run, tmp_path / "mlp", "w3")
    transformers_model("t5", ZOO["t5"].config).save_pretrained(tmp_path / "source")
    saved(tmp_path / "t5", "t5", {"weights": str(tmp_path / "source")})
    assert "is a T5ForConditionalGeneration and no causal language model" in refusal(run, tmp_path / "t5", "w3")
    (tmp_path / "empty").mkdir()
    assert "empty is no checkpoint and holds no checkpoints" in refusal(run, tmp_path / "empty", "w3")
    assert (
        f"holds no checkpoints (folders step-… with a trainer.json). {tmp_path / 'mlp'} holds some: name that folder"
        in refusal(run, tmp_path, "w3")
    )
    assert "has no causal language model of type 't5'" in refusal(run, tmp_path / "source", "w3")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    assert "It holds weights as transformers and peft load them. Name the run's job" in refusal(run, tmp_path / "empty", "w3")
    assert "nowhere" in refusal(run, tmp_path / "nowhere", "w3")
    loop = registry.model("mlp")(**mlp)
    own = {key: value for key, value in STATE.items() if key in ("scheduler", "scheduler_state", "scheduled")}
    checkpoint.save(tmp_path / "loop", 1, loop, torch.optim.SGD(loop.parameters(), lr=0.1), own, alone(), keep=1)
    assert "does not name its model, because it comes from a loop of your own" in refusal(run, tmp_path / "loop", "w3")
