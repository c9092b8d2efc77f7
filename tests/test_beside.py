"""What lies beside exported weights: the tokenizer, the template and the ends of the data that a run was trained with; and
`hetpipe generate`, which writes by them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"

from hetpipe.building.build import build_layers
from hetpipe.building.content import content_of
from hetpipe.checkpoints import checkpoint
from hetpipe.checkpoints.origin.base import pinned_base
from hetpipe.checkpoints.origin.configured import config_of
from hetpipe.checkpoints.resume import identity
from hetpipe.documents.job import Job
from hetpipe.files.messages import InputError
from hetpipe.hf.exports.export import export_weights
from hetpipe.language.conversations import chat
from hetpipe.layers.weights import materialise
from hetpipe.processes.world import alone
from tests.support.chats import CHATML, PHI, chat_of, lines, tokenizer
from tests.support.finetuning import small_model
from tests.support.jobs import STATE

import transformers  # isort: skip

KINDS = ("adapter", "merged", "model")


class Run:
    """A checkpoint of a run over chats, as its job leaves one."""

    def __init__(self, place: Path, kind: str, tokenizer: str = "", **args: Any) -> None:
        self.place, self.kind, self.base = place, kind, place / "base"
        if not self.base.exists():
            small_model(self.base, num_hidden_layers=1)
        self.words = tokenizer or str(self.base)
        chats = [chat_of("Hello", "Yes."), chat_of("How are you?", "I am well.")]
        file = lines(place / "chats.jsonl", chats)
        args = {"file": file, "tokenizer": self.words, **args}
        data = {"name": "chat", "args": args}
        adapter = {"adapter": {"r": 2}} if kind != "model" else {}
        model = {"name": "causal_lm", "args": {"weights": str(self.base)}}
        job = Job.parse(
            {"format": "hetpipe.job/1", "model": model, **adapter, "data": data, "train": {"global_batch": 2, "steps": 1}},
            "this test",
        )
        self.job, splits = job, chat(**args, test_fraction=0)
        self.content = content_of(splits.train, splits.made_of)
        self.layers = build_layers(job)
        materialise(self.layers)
        trained = [p for p in self.layers.parameters() if p.requires_grad]
        said = identity(job) | pinned_base(self.layers) | config_of(self.layers)
        state = {**STATE, "job": said, "data": self.content.model_dump(mode="json")}
        self.saved = place / "saved"
        checkpoint.save(self.saved, 1, self.layers, torch.optim.SGD(trained, lr=0.1), state, alone(), keep=1)

    def export(self) -> Path:
        shutil.rmtree(self.place / "out", ignore_errors=True)
        return export_weights(self.layers, self.saved, self.place / "out", merge=self.kind == "merged")


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_and_the_template_of_the_data_lie_there(kind: str, tmp_path: Path) -> None:
    """Not those of the base, of which a model that was trained with others makes nothing."""
    other = tokenizer(tmp_path / "other", PHI, special=["<|end|>", "<|user|>", "<|assistant|>", "<s>", "</s>"])
    (tmp_path / "mine.jinja").write_text(CHATML.replace("<|im_start|>", "<s>"))
    for args in (
        {},
        {"tokenizer": other},
        {"template": str(tmp_path / "mine.jinja")},
        {"tokenizer": other, "template": str(tmp_path / "mine.jinja")},
    ):
        run = Run(tmp_path, kind, **args)
        folder = run.export()
        wanted: Any = transformers.AutoTokenizer.from_pretrained(run.words)
        if "template" in args:
            wanted.chat_template = (tmp_path / "mine.jinja").read_text()
        again: Any = transformers.AutoTokenizer.from_pretrained(folder)
        said = chat_of("Hello", "Yes.")["messages"]
        assert again.apply_chat_template(said) == wanted.apply_chat_template(said), args
        assert again.chat_template == wanted.chat_template
        assert again.get_vocab() == wanted.get_vocab()


def of_another_word(words: Path) -> None:
    content = json.loads((words / "tokenizer.json").read_text())
    content["model"]["vocab"]["Ġwell?"] = len(content["model"]["vocab"]) + 40
    (words / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "told", "left"),
    [
        (shutil.rmtree, "is without a tokenizer, since that of the run's data is not at hand: there is no folder", ()),
        (of_another_word, "is without a tokenizer, since that of the run's data is not at hand: ", ()),
        (
            lambda words: (words / "chat_template.jinja").write_text(CHATML + " "),
            "is without a template of chats, since that of the run's data is not at hand: ",
            ("tokenizer.json",),
        ),
    ],
)
def test_what_has_changed_since_is_not_written_for_what_it_was(
    change: Callable[[Path], object], told: str, left: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = Path(tokenizer(tmp_path / "words", special=["<|im_end|>", "<|im_start|>", "<s>", "</s>"]))  # not as the base's
    run = Run(tmp_path, "model", str(words))
    change(words)
    folder = run.export()
    assert told in capsys.readouterr().err
    found = {path.name for path in folder.iterdir()}
    assert {"tokenizer.json", "chat_template.jinja"} & found == {*left}


def test_a_base_that_was_moved_with_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, "adapter")
    run.base = run.base.rename(tmp_path / "moved")
    run.layers = build_layers(
        Job.parse(
            {
                **run.job.model_dump(mode="json", exclude_unset=True),
                "model": {"name": "causal_lm", "args": {"weights": str(run.base)}},
            },
            "this test",
        )
    )
    folder = run.export()
    assert "note" not in capsys.readouterr().err
    assert transformers.AutoTokenizer.from_pretrained(folder).chat_template == CHATML
    of_another_word(run.base)
    run.export()
    assert f"is not at hand: there is no folder '{run.words}'" in capsys.readouterr().err


def test_a_template_in_a_file_that_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(CHATML)
    run = Run(tmp_path, "adapter", template=str(file))
    file.write_text(CHATML.replace("user", "you").replace("m.role", "m['role']"))
    folder = run.export()
    assert f"{file} holds another one by now" in capsys.readouterr().err
    assert transformers.AutoTokenizer.from_pretrained(folder).chat_template is None


def test_a_tokenizer_that_does_not_say_its_class_is_found_beside_adapters(tmp_path: Path) -> None:
    """It is found by the model's configuration, which is not there."""
    run = Run(tmp_path, "adapter")
    (run.base / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    run = Run(tmp_path, "adapter")
    assert transformers.AutoTokenizer.from_pretrained(run.export()).eos_token == "</s>"


@pytest.mark.parametrize("kind", KINDS)
def test_what_ends_an_answer_ends_what_is_written(kind: str, tmp_path: Path) -> None:
    run = Run(tmp_path, kind)
    words: Any = transformers.AutoTokenizer.from_pretrained(run.base)
    end = words.convert_tokens_to_ids("<|im_end|>")
    assert run.content.ends == (end,)
    for before, wanted in ((None, [end]), (2, [2, end]), ([7, 3], [7, 3, end]), ([end, 5], [end, 5])):
        config = {"repetition_penalty": 1.5, "do_sample": True, "top_p": 0.9, **({"eos_token_id": before} if before else {})}
        (run.base / "generation_config.json").write_text(json.dumps(config))
        folder = run.export()
        if kind == "adapter" and before == [end, 5]:
            assert not (folder / "generation_config.json").exists(), "the base ends there, too"
            continue
        found = transformers.GenerationConfig.from_pretrained(folder)
        assert found.eos_token_id == wanted, before
        assert (found.repetition_penalty, found.top_p) == (1.5, 0.9)
    (run.base / "generation_config.json").unlink()
    assert transformers.GenerationConfig.from_pretrained(run.export()).eos_token_id == [end]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_not_written_beside_another_configuration(kind: str, tmp_path: Path) -> None:
    """Of a model that was trained as a whole nothing said that its rotary frequencies were others by now."""
    run = Run(tmp_path, kind)
    file = run.base / "config.json"
    was: Any = run.layers[0].configuration
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "rms_norm_eps": 0.25, "use_cache": False, "transformers_version": "5.0"}))
    run.layers = build_layers(run.job)
    with pytest.raises(InputError) as caught:
        run.export()
    assert str(caught.value).endswith(
        "was saved with another configuration of its model. Set these keys back in the model's config.json, or in model.args "
        "of the "
        f"job:\n  model.config.rms_norm_eps was {was['rms_norm_eps']}, is 0.25"
    )
    file.write_text(json.dumps({**config, "use_cache": False}))
    run.layers = build_layers(run.job)
    assert run.export().is_dir()
