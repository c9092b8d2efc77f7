"""`hetpipe finetune`: from arguments to a job, what is said before training, what is refused. (Runs: test_finetune_runs.py.)"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetpipe.cli.finetune.table import how_to_load, instead_text, numbered
from hetpipe.documents.cluster import Cluster
from hetpipe.documents.job import Job
from hetpipe.finetune.asked import Asked
from hetpipe.finetune.draft import DataFacts, ModelFacts, base_of, draft, filled, open_keys, precision_of, schedule, steps_of
from hetpipe.finetune.emulated import parse_emulated
from hetpipe.finetune.facts import model_facts
from hetpipe.finetune.folder import write_cluster, write_job
from hetpipe.finetune.job import Made, make_job
from hetpipe.finetune.kinds import Found, kind_of
from hetpipe.finetune.looked import look
from hetpipe.finetune.program import Finetuned
from hetpipe.finetune.statement import Instead, others
from hetpipe.processes.ranks.preload import modules_of
from hetpipe.show.report import plan_text
from tests.support.chats import chat_of, lines, refusal, tokenizer
from tests.support.commands import Command
from tests.support.finetuning import CARDS, chats, small_model
from tests.support.plans_shown import many, three

CHATS = Found("chat", {"file": "chats.jsonl"})


def asked(**options: Any) -> Asked:
    return Asked(**{"model": "tiny", "data": ("chats.jsonl",), **options})


def drafted(*, found: Found = CHATS, cards: bool = False, **options: Any) -> dict[str, Any]:
    emulate = options.get("emulate")
    cluster = Cluster.parse(parse_emulated(emulate), "--emulate") if emulate else None
    return draft(asked(**options), found, cluster, cards=cards)


def job_of(**options: Any) -> Made:
    return make_job(asked(**options), look(asked(**options)))


def facts(*lengths: int) -> DataFacts:
    """Of samples of these lengths."""
    count = sum(lengths)
    return DataFacts(len(lengths), 0, count, count, max(lengths), lengths)


def test_preferences_are_asked_for_by_their_method(tmp_path: Path) -> None:
    data = lines(tmp_path / "answers.jsonl", [{"prompt": "Hello!", "chosen": "Yes.", "rejected": "No."}])
    found = kind_of([data], preferences=True)
    assert found == Found("preferences", {"file": data})
    job = filled(drafted(found=found, method="simpo"), ModelFacts(4096, apart=True), facts(*[40] * 30))
    assert Job.parse(job, "the job").loss.prefers
    assert (job["data"]["name"], job["loss"], job["train"]["optimizer"]["lr"]) == ("preferences", {"name": "simpo"}, 5e-6)
    assert "pack" not in job["data"]["args"]
    job = drafted(found=found, method="reward")
    assert (job["loss"], job["adapter"]["train_also"], job["train"]["optimizer"]["lr"]) == ({"name": "reward"}, ["head"], 1e-4)
    assert "--method 'kto': it compares each answer with the mean of those beside it" in refusal(asked, method="kto")
    assert "these are preference data, from which" in refusal(kind_of, data=[data])
    plain = lines(tmp_path / "plain.jsonl", [{"prompt": "Hello!", "completion": "Yes."}])
    assert "no key chosen, beside which" in refusal(kind_of, data=[plain], preferences=True)
    assert "--method 'dpp'; did you mean 'dpo'" in refusal(asked, method="dpp")
    assert "compares the last answers" in refusal(asked, method="dpo", turns="all")


def test_every_default_stands_in_the_job() -> None:
    job = filled(drafted(cards=True), ModelFacts(4096, apart=True), facts(*[40] * 30, 100))
    assert Job.parse(job, "the job")
    assert job["adapter"] == {"kind": "lora", "r": 16, "alpha": 32, "targets": "all-linear", "base": "bf16"}
    assert job["data"] == {"name": "chat", "args": {"file": "chats.jsonl", "tokenizer": "tiny", "length": 100, "pack": True}}
    assert job["loss"] == {"name": "cross_entropy", "weight": "tokens", "fused": "auto"}
    assert job["train"] == {
        "epochs": 1,
        "optimizer": {"name": "AdamW", "lr": 2e-4},
        "clip_norm": 1.0,
        "precision": "auto",
        "global_batch": 16,  # rows: two samples of 40 tokens fit into 100
        "scheduler": {"name": "CosineAnnealingLR", "T_max": 1, "warmup_steps": 1},
    }
    assert job["checkpoint"] == {"folder": "finetuned/checkpoints"}
    assert job["log"] == {"folder": "finetuned/run"}
    assert job["export"] == {"folder": "finetuned/adapter"}
    assert "cluster" not in job


def test_without_adapters_all_parameters_train_at_a_smaller_rate() -> None:
    job = drafted(lora="none")
    assert "adapter" not in job
    assert job["export"] == {"folder": "finetuned/model"}
    assert job["train"]["optimizer"]["lr"] == 1e-5
    assert drafted(lora="none", rate=3e-5)["train"]["optimizer"]["lr"] == 3e-5


def test_ranks_are_forked_from_a_process_that_has_imported_what_adapters_need() -> None:
    adapted, plain = (Job.parse(filled(drafted(lora=lora), ModelFacts(), facts(5)), "it") for lora in ("r=4", "none"))
    assert modules_of(plain) == ["hetpipe.models.causal_lm"]
    (also,) = set(modules_of(adapted)) - set(modules_of(plain))
    code = f"import sys, {also}; print('peft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


def test_adapters_that_go_on_say_all_but_how_the_model_is_held(tmp_path: Path) -> None:
    job = drafted(adapter="owner/adapter", precision="bf16")
    assert job["adapter"] == {"weights": "owner/adapter", "base": "bf16"}
    assert job["train"]["optimizer"]["lr"] == 2e-4
    assert job["export"] == {"folder": "finetuned/adapter"}
    (tmp_path / "tokenizer.json").write_text("{}")
    (own,) = {drafted(adapter=str(tmp_path))["data"]["args"]["tokenizer"]}
    assert own == str(tmp_path), "which its chats were written with"
    assert drafted(adapter=str(tmp_path), tokenizer="words")["data"]["args"]["tokenizer"] == "words"
    (said,) = {drafted(adapter="here", settings=("adapter.dropout=0.1",))["adapter"]["dropout"]}
    assert said == 0.1


def test_options_and_settings_are_kept() -> None:
    job = drafted(
        length=64,
        global_batch=8,
        epochs=3,
        tokenizer="words",
        out="here",
        precision="bf16",
        emulate=(CARDS,),
        settings=("adapter.targets=[q_proj]", "data.args.pack=false", "train.scheduler=", "train.seed=7"),
    )
    assert open_keys(job) == []
    full = filled(job, ModelFacts(32, apart=True), facts(10, 20))
    assert full == job
    assert full["data"]["args"] | {"length": 64, "pack": False, "tokenizer": "words"} == full["data"]["args"]
    assert full["adapter"]["targets"] == ["q_proj"]
    assert full["adapter"]["base"] == "bf16"
    assert (full["train"]["epochs"], full["train"]["seed"], full["train"]["scheduler"]) == (3, 7, None)
    assert full["cluster"] == "here/cluster.yaml"
    assert Job.parse(full, "the job").train.scheduler is None


def test_steps_in_the_place_of_epochs() -> None:
    job = filled(drafted(settings=("train.steps=50",)), ModelFacts(), facts(5, 5))
    assert Job.parse(job, "the job").train.steps == 50
    assert job["train"]["scheduler"] == schedule(50) == {"name": "CosineAnnealingLR", "T_max": 48, "warmup_steps": 2}
    assert "give either 'steps' or 'epochs'" in refusal(
        lambda: Job.parse(filled(drafted(epochs=2, settings=("train.steps=50",)), ModelFacts(), facts(5)), "it")
    )
    assert steps_of({"epochs": 3, "global_batch": 8}, [17]) == 9
    assert steps_of({"epochs": 2, "global_batch": 4}, [5, 4, 1]) == 8


def test_rows_are_not_packed_where_samples_would_move_each_others_positions() -> None:
    model = ModelFacts(4096, apart=True, switch=40)
    for lengths, packed in (((30, 40), True), ((41, 90), True), ((40, 41), False), ((3, 500, 41), False)):
        assert filled(drafted(), model, facts(*lengths))["data"]["args"]["pack"] is packed
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    phi3 = {
        "type": "phi3",
        "original_max_position_embeddings": 100,
        "max_position_embeddings": 1000,
        "pad_token_id": 0,
        "rope_parameters": longrope,
    }
    assert model_facts({"name": "causal_lm", "args": phi3}) == ModelFacts(1000, apart=True, switch=100)


def test_samples_are_no_longer_than_the_model_has_positions_for() -> None:
    long = facts(5000)
    assert (
        filled(drafted(), ModelFacts(512), long)["data"]["args"] | {"length": 512, "pack": False}
        == (filled(drafted(), ModelFacts(512), long)["data"]["args"])
    )
    assert filled(drafted(), ModelFacts(), long)["data"]["args"]["length"] == 2048
    text = Found("text", {"files": "a.txt"})
    args = filled(drafted(found=text), ModelFacts(512, apart=True), DataFacts(9, 1, 9 * 512, 9 * 512, 512))["data"]["args"]
    assert args == {"files": "a.txt", "tokenizer": "tiny", "context": 512}


def test_samples_are_padded_where_the_model_does_not_tell_them_apart_or_the_job_says_sizes() -> None:
    assert filled(drafted(), ModelFacts(apart=False), None)["data"]["args"]["pack"] is False
    sizes = drafted(settings=("data.args.sizes=[64]",))
    assert filled(sizes, ModelFacts(apart=True), None)["data"]["args"]["pack"] is False


@pytest.mark.parametrize(
    ("given", "slowdown", "cards", "precision", "base"),
    [
        (None, None, True, "auto", "bf16"),
        (None, None, False, None, "as-is"),
        (None, 4.0, True, None, "as-is"),
        (None, {"fp32": 6.0, "fp16": 1.5}, False, "auto", "bf16"),
        (None, {"fp32": 6.0}, False, "auto", "as-is"),
        ("fp16", None, True, "fp16", "fp16"),
        ("fp32", None, True, "fp32", "as-is"),
        ("a=bf16", 2.0, False, {"a": "bf16"}, "bf16"),
        ("b=bf16", 2.0, False, {"b": "bf16"}, "as-is"),
    ],
    ids=str,
)
def test_half_precision_where_devices_have_it(given: Any, slowdown: Any, cards: bool, precision: Any, base: str) -> None:
    cluster = None
    if slowdown is not None:
        kind = {"memory": "1 GiB", "emulate": {"slowdown": slowdown}}
        cluster = Cluster.parse(
            {"format": "hetpipe.cluster/1", "device_types": {"a": kind}, "nodes": [{"name": "n0", "devices": {"a": 2}}]}, "it"
        )
    assert precision_of(given, cluster, cards=cards) == precision
    assert base_of(precision, cluster) == base


def test_options_that_do_not_go_together() -> None:
    assert "Leave one of the two out" in refusal(asked, cluster="c.yaml", emulate=(CARDS,))
    assert "with --lora none all weights train" in refusal(asked, lora="none", base="nf4")
    assert "and --lora r=4 both describe the adapters" in refusal(asked, lora="r=4", adapter="finetuned/adapter")
    assert "did you mean 'nf4'?" in refusal(lambda: look(asked(base="nf5")))
    for rate in (float("nan"), float("inf"), -1.0):
        assert f"--lr {rate}: write a number of at least 0, such as 2e-4" in refusal(asked, rate=rate)


def test_the_kind_of_data_is_told_by_the_first_record(tmp_path: Path) -> None:
    def kind(record: Any, name: str = "a.jsonl") -> Found:
        return kind_of([lines(tmp_path / name, [record])])

    assert kind(chat_of("a", "b")) == Found("chat", {"file": str(tmp_path / "a.jsonl")})
    assert kind({"conversations": []}).kind == kind({"prompt": [], "completion": []}).kind == "chat"
    for record in ({"prompt": "a", "completion": "b"}, {"instruction": "a", "output": "b"}, {"question": "a", "answer": "b"}):
        assert kind(record).kind == "instructions"
    assert kind({"text": "words"}) == Found("text", {"files": str(tmp_path / "a.jsonl")})
    assert kind("just words", "a.md") == Found("text", {"files": str(tmp_path / "a.md")})
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "b.txt").write_text("words")
    assert kind_of([str(folder)]) == Found("text", {"files": f"{folder}/**/*.txt"})
    file = lines(folder / "c.jsonl", [chat_of("a", "b")])
    assert kind_of([str(folder)]) == Found("chat", {"file": str(folder)})
    both = [file, str(tmp_path / "a.jsonl")]
    assert kind_of(both).files == {"file": both}
    assert "some of these are plain texts, and others hold records" in refusal(kind_of, data=[file, str(tmp_path / "a.md")])
    spoken = lines(tmp_path / "said.jsonl", [{"ask": "a", "reply": "b"}])
    assert kind_of([spoken], {"prompt": "ask", "completion": "reply"}).kind == "instructions"


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        (
            {"words": "a"},
            "line 1 is a record with the keys ['words']; expected one with messages (or conversations), prompt and c",
        ),
        ("[1]", "record 1: expected a mapping with the key messages, or prompt and completion, found a int"),
        ("{", "line 1: "),
        ("", "line 1: the line is empty"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            "line 1: it has ['chosen', 'rejected']: these are preference data, from which",
        ),
    ],
    ids=str,
)
def test_data_of_no_known_kind(tmp_path: Path, record: Any, wrong: str) -> None:
    assert wrong in refusal(kind_of, data=[lines(tmp_path / "a.jsonl", [record])])
    assert "holds no records" in refusal(kind_of, data=[lines(tmp_path / "b.jsonl", [])])


def test_a_job_is_made_of_a_model_and_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the real samples, which are read as they are."""
    monkeypatch.chdir(tmp_path)
    small_model(Path("tiny"))
    chats(Path("chats.jsonl"), 40)
    made = job_of(emulate=(CARDS,), global_batch=8, epochs=2)
    args = made.job.data.args
    assert args["pack"] is True
    assert 20 < args["length"] < 100  # the longest
    rows = int(re.findall(r"packed into (\d+) rows", made.data)[0])
    assert made.data.startswith("36 chats to train on, 4 held out; ")
    assert made.job.train.scheduler is not None
    steps = 2 * -(-rows // 8)
    assert made.job.train.scheduler.arguments["T_max"] + made.job.train.scheduler.warmup_steps == steps
    assert model_facts({"name": "gpt"}) == ModelFacts()
    plain = job_of(settings=("data.args.pack=false",), lora="none")
    assert "the longest has" in plain.data
    write_cluster("out", made)
    file = write_job("out", made, "hetpipe finetune …", Path("job.yaml"))
    assert file.read_text() == Path("job.yaml").read_text()
    assert Job.read(file).model_copy(update={"cluster": None}) == made.job.model_copy(update={"cluster": None})
    assert Cluster.load("out/cluster.yaml") == Cluster.parse(parse_emulated([CARDS]), "it")


def test_what_is_missing_is_told_before_ranks_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Command) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hetpipe.training.start.start_ranks", lambda *_: pytest.fail("ranks were started"))
    small_model(Path("tiny"))
    chats(Path("chats.jsonl"), 20)
    tokenizer(Path("untold"), template=None)
    (tmp_path / "file").write_text("")

    def error(*arguments: object) -> str:
        ended = run("finetune", *arguments)
        assert ended.code == 2
        (last,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        return last

    assert "nowhere" in error("nowhere", "chats.jsonl")
    assert "there.jsonl" in error("tiny", "there.jsonl")
    assert "has no template of chats" in error("tiny", "chats.jsonl", "--tokenizer", "untold")
    assert "there is no folder 'none' with a tokenizer" in error("tiny", "chats.jsonl", "--tokenizer", "none")
    assert "unknown key 'rnk'" in error("tiny", "chats.jsonl", "--lora", "rnk=3")
    assert "file is a file. Name a folder" in error("tiny", "chats.jsonl", "-o", "file")
    assert "cannot read the setting 'seed'" in error("tiny", "chats.jsonl", "--set", "seed")
    assert not Path("finetuned").exists()
    assert "it is called --length" in run("finetune", "tiny", "chats.jsonl", "--max-length", "4").err


def made_of(job: dict[str, Any]) -> Made:
    return Made(job, Job.parse(job, "it"), None, "", None, 1, open_schedule=True)


def test_what_else_could_be_is_simulated_or_does_not_fit() -> None:
    """Three devices of which two are too small for the whole model."""
    study = three()
    assert study.problem is not None
    equal, fast, slow = others(*study.problem, study.plan.global_batch)
    assert (equal.name, fast.name, slow.name) == ("equal data parallel", "fast alone", "one slow alone")
    assert equal.seconds is slow.seconds is None
    assert equal.has_bytes == slow.has_bytes
    assert 0 < (slow.has_bytes or 0) <= study.problem[1].device_types["slow"].memory
    assert equal.needs_bytes is not None
    assert slow.needs_bytes is not None
    assert min(equal.needs_bytes, slow.needs_bytes) > 2**20 * 3 * 8  # parameters, gradients, and what the optimizer keeps
    assert study.plan.predicted is not None
    assert fast.seconds is not None
    assert fast.seconds > study.plan.predicted.step_seconds
    assert "does not fit: needs" in instead_text(equal, 1.0)


def test_a_plan_in_a_sentence() -> None:
    text = plan_text(three().scene)
    assert re.fullmatch(r"fast \(n0/0\) runs layers 0–\d of 8, slow \(n1/[01]\) runs .*: 16 of 16 samples of a step, in .*", text)
    assert "slow (n8/0 and" not in plan_text(many().scene)
    assert "each run layers" in plan_text(many().scene)


def test_what_else_could_be_is_told_with_both_numbers() -> None:
    assert instead_text(Instead(name="x", seconds=3.0), 1.5) == "3.00 s a step, 2.00 × as long"
    assert instead_text(Instead(name="x", reason="no link"), 1.5) == "no link"
    assert numbered(999) == "999"
    job = made_of(filled(drafted(), ModelFacts(), facts(5))).job
    loads = how_to_load(Finetuned(statement=None, folder=Path("o/adapter")), job)  # type: ignore[arg-type]
    assert 'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("tiny"), "o/adapter")' in loads
    scored = job.model_copy(update={"loss": job.loss.model_copy(update={"name": "reward"})})
    loads = how_to_load(Finetuned(statement=None, folder=Path("o/adapter")), scored)  # type: ignore[arg-type]
    assert 'AutoModelForSequenceClassification.from_pretrained("tiny", num_labels=1), "o/adapter")' in loads
