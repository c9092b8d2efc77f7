"""The job file: what it accepts, and what it says of everything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hetpipe.documents.job import Job, apply_settings
from hetpipe.files.messages import InputError
from tests.support.jobs import Folder, train

MINIMAL: dict[str, Any] = {
    "format": "hetpipe.job/1",
    "model": {"name": "mlp"},
    "data": {"name": "random_classification"},
    "train": {"global_batch": 8, "steps": 5},
}

ONE_STEP = {"global_batch": 8, "steps": 1}


def job(**sections: Any) -> Job:
    return Job.parse({**MINIMAL, **sections}, "job.yaml")


def read(folder: Path, text: str, *settings: str) -> Job:
    file = folder / "job.yaml"
    file.write_text(text)
    return Job.read(file, settings)


def test_what_is_left_out_has_its_documented_value() -> None:
    found = job()
    assert (found.loss.name, found.loss.weight, found.loss.ignore_index) == ("cross_entropy", "samples", -100)
    assert (found.plan.partitioner, found.plan.schedule, found.plan.backend, found.plan.file) == ("auto", "auto", "torch", None)
    assert (found.train.optimizer.name, found.train.optimizer.arguments, found.train.scheduler) == ("AdamW", {}, None)
    assert (found.train.dtype, found.train.seed, found.train.clip_norm) == ("float32", 0, None)
    assert found.profiler.microbatch_sizes == (1, 2, 4, 8)
    assert (found.cluster, found.profile, found.checkpoint, found.log) == (None, None, None, None)
    assert found.read_cluster() is None


def test_torch_names_keep_their_arguments() -> None:
    found = job(
        train={
            "global_batch": 8,
            "epochs": 2,
            "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9},
            "scheduler": {"name": "StepLR", "step_size": 3, "warmup_steps": 2},
        }
    )
    assert found.train.optimizer.arguments == {"lr": 0.1, "momentum": 0.9}
    assert found.train.scheduler is not None
    assert (found.train.scheduler.arguments, found.train.scheduler.warmup_steps) == ({"step_size": 3}, 2)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"modle": {}}, "unknown key 'modle'; did you mean 'model'?"),
        ({"model": {"nme": "gpt"}}, "model: unknown key 'nme'; did you mean 'name'?"),
        ({"model": {"name": "gpt", "batchnorm": "x"}}, "unknown key 'batchnorm'; did you mean 'batch_norm'?"),
        ({"data": {"name": "text", "arg": {}}}, "data: unknown key 'arg'; did you mean 'args'?"),
        ({"loss": {"weights": "tokens"}}, "loss: unknown key 'weights'; did you mean 'weight'?"),
        ({"train": {"global_batch": 8, "step": 5}}, "train: unknown key 'step'; did you mean 'steps'?"),
        ({"plan": {"partitoner": "auto"}}, "plan: unknown key 'partitoner'; did you mean 'partitioner'?"),
        ({"checkpoint": {"folder": "c", "every_step": 5}}, "checkpoint: unknown key 'every_step'; did you mean 'every_steps'?"),
        ({"log": {"foldr": "c"}}, "log: unknown key 'foldr'; did you mean 'folder'?"),
        ({"profiler": {"repeat": 5}}, "profiler: unknown key 'repeat'; did you mean 'repeats'?"),
        ({"train": {"global_batch": 8}}, "train: give either 'steps' or 'epochs', and not both"),
        ({"train": {**ONE_STEP, "epochs": 1}}, "train: give either 'steps' or 'epochs', and not both"),
        ({"train": {"global_batch": 0, "steps": 1}}, "train.global_batch: Input should be greater than or equal to 1 (got 0)"),
        ({"train": {"global_batch": 8, "steps": 0}}, "train.steps: Input should be greater than or equal to 1 (got 0)"),
        ({"train": {**ONE_STEP, "clip_norm": 0}}, "train.clip_norm: Input should be greater than 0 (got 0)"),
        ({"train": {"global_batch": 10**9, "steps": 1}}, "train.global_batch: Input should be less than or equal to 1048576"),
        ({"train": {**ONE_STEP, "seed": 10**14}}, "train.seed: Input should be less than or equal to 1000000000000"),
        ({"train": {**ONE_STEP, "seed": "3"}}, "train.seed: Input should be a valid integer (got '3')"),
        ({"train": {**ONE_STEP, "clip_norm": float("inf")}}, "train.clip_norm: Input should be a finite number (got inf)"),
        ({"train": {**ONE_STEP, "clip_norm": True}}, "train.clip_norm: Input should be a valid number (got True)"),
        ({"train": {**ONE_STEP, "optimizer": {"name": "SGD", "lr": float("nan")}}}, "train.optimizer: 'lr' is nan; write a"),
        ({"checkpoint": {"folder": "c", "resume": "yes"}}, "checkpoint.resume: Input should be a valid boolean: write true or"),
        ({"log": {"folder": ""}}, "log.folder: String should have at least 1 character (got '')"),
        ({"train": {**ONE_STEP, "dtype": "float16"}}, "train.dtype: Input should be 'float32', 'float64' or 'bfloat16'"),
        ({"train": {**ONE_STEP, "optimizer": "AdamW"}}, "train.optimizer: write {name: AdamW}"),
        ({"train": {**ONE_STEP, "scheduler": "StepLR"}}, "train.scheduler: write {name: StepLR}"),
        ({"model": "gpt"}, "model: write {name: gpt}"),
        ({"model": {}}, "model: give either 'name' (from the registry) or 'target' (package.module:function), and not both"),
        ({"model": {"name": "gpt", "target": "a:b"}}, "model: give either 'name'"),
        ({"data": {"args": {}}}, "data: give either 'name'"),
        (
            {"loss": {"class_weights": [1.0, 2.0], "weight": "tokens"}},
            "give only one of 'weight' and 'class_weights', because each decides what",
        ),
        (
            {"loss": {"class_weights": [1.0], "weight_fn": "a:b"}},
            "loss: give only one of 'weight_fn' and 'class_weights', because each decides",
        ),
        ({"loss": {"target": "a:b", "class_weights": [1.0]}}, "'class_weights' are for name: cross_entropy only. For another"),
        ({"loss": {"class_weights": [0.0, 0.0]}}, "loss: 'class_weights' has no number above 0"),
        ({"loss": {"class_weights": [1.0, -1.0]}}, "loss.class_weights.1: Input should be greater than or equal to 0 (got -1.0)"),
        ({"loss": {"name": "mse", "target": "a:b"}}, "loss: give either 'name' or 'target' (package.module:function)"),
        ({"loss": {"weight": "token"}}, "loss.weight: Input should be 'samples' or 'tokens' (got 'token')"),
        ({"plan": {"schedule": "zb"}}, "plan.schedule: Input should be 'auto', 'gpipe' or '1f1b' (got 'zb')"),
        ({"plan": {"memory_reserve": 1.0}}, "plan: memory_reserve is a fraction of a device's memory, at least 0 and"),
        ({"checkpoint": {"every_steps": 5}}, "checkpoint.folder: Field required"),
        ({"profiler": {"microbatch_sizes": [0, 2]}}, "profiler.microbatch_sizes.0: Input should be greater than"),
        ({"format": "hetpipe.plan/1"}, "its format is 'hetpipe.plan/1', expected 'hetpipe.job/1'"),
        ({"train": [1, 2]}, "train: Input should be a valid dictionary or instance of TrainSection"),
    ],
)
def test_message(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        job(**sections)
    assert message in str(caught.value)
    assert str(caught.value).startswith("job.yaml: ")


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(InputError) as caught:
        job(model={}, train={"global_batch": -1, "steps": 1}, log={})
    text = str(caught.value)
    assert "3 fault(s) in this job file" in text
    assert all(part in text for part in ("model: ", "train.global_batch: ", "log.folder: "))


def test_settings_change_keys_at_any_depth(tmp_path: Path) -> None:
    text = yaml.safe_dump(MINIMAL)
    found = read(
        tmp_path,
        text,
        "train.steps=50",
        "train.optimizer.name=SGD",
        "train.optimizer.lr=1e-3",
        "model.args.layers=2",
        "log.folder=runs/x",
        "profiler.microbatch_sizes=[1, 3]",
    )
    assert found.train.steps == 50
    assert (found.train.optimizer.name, found.train.optimizer.arguments) == ("SGD", {"lr": 0.001})
    assert found.model.args == {"layers": 2}
    assert found.log is not None
    assert found.log.folder == "runs/x"
    assert found.with_log("other.yaml") is found
    without = found.model_copy(update={"log": None})
    logs = [without.with_log(file).log for file in ("job.yaml", "first/job.yaml", "/data/second/job.json", "../job.yaml")]
    assert [log and log.folder for log in logs] == ["runs/job", "runs/first-job", "runs/second-job", "runs/job"]
    assert found.profiler.microbatch_sizes == (1, 3)


def test_an_empty_setting_takes_a_key_away(tmp_path: Path) -> None:
    found = read(tmp_path, yaml.safe_dump(MINIMAL), "train.steps=", "train.epochs=3")
    assert (found.train.steps, found.train.epochs) == (None, 3)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.steps", "cannot read the setting 'train.steps'. Write key=value, for example train.steps=50"),
        ("=5", "cannot read the setting '=5'"),
        ("train.steps=[1", "cannot read the value of the setting 'train.steps=[1'"),
        ("train.steps.more=1", "the setting 'train.steps.more=1' sets a key of 'steps', which is 5 and has no keys"),
        ("train.stepz=1", "unknown key 'stepz'; did you mean 'steps'?"),
        ("trian.steps=1", "unknown key 'trian'; did you mean 'train'?"),
        ("train.steps=many", "train.steps: Input should be a valid integer"),
        ("train.steps=1e400", "train.steps: Input should be a valid integer (got inf)"),
        ("train.steps=true", "train.steps: Input should be a valid integer (got True)"),
        ("train.steps=0x_", "train.steps: Input should be a valid integer (got '0x_')"),
        ("train.steps=1:30", "train.steps: Input should be a valid integer (got '1:30')"),
        ("train.steps=1_000", "train.steps: Input should be a valid integer (got '1_000')"),
        ("checkpoint.resume=no", "checkpoint.resume: Input should be a valid boolean: write true or false (got 'no')"),
        ("train.steps=!!int abc", "it is not valid YAML: line 1, column 1: cannot read this as int"),
        (f"train.steps={'9' * 5_000}", "it is not valid YAML: line 1, column 1: cannot read this as int (Exceeds the limit"),
        (f"train.steps={'[' * 20_000}", "more than 100 levels of mappings and lists"),
        ('log.folder="a\\0b"', "it is not usable: top level: the text holds a NUL character"),
        (f"{'x.' * 2_000}y=1", "unknown key 'x'"),
    ],
)
def test_message_of_a_setting(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, yaml.safe_dump(MINIMAL), setting)
    assert message in str(caught.value)


def test_dates_are_text(tmp_path: Path) -> None:
    found = read(tmp_path, yaml.safe_dump(MINIMAL), "log.folder=2001-02-03", "model.args.since=2001-99-99")
    assert found.log is not None
    assert (found.log.folder, found.model.args) == ("2001-02-03", {"since": "2001-99-99"})


def test_settings_leave_what_they_were_given_alone() -> None:
    data = {"train": {"steps": 5}}
    assert apply_settings(dict(data), ["train.steps=6"]) == {"train": {"steps": 6}}
    assert data == {"train": {"steps": 5}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a mapping with the key 'format', found nothing"),
        ("- a\n- b\n", "expected a mapping with the key 'format', found a list"),
        ("just words", "expected a mapping with the key 'format', found a str"),
        ("a: [1,\n", "is not valid YAML"),
        ("format: hetpipe.job/1\nformat: hetpipe.job/1\n", "the key 'format' is given twice"),
    ],
)
def test_files_that_are_no_job(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text, "train.steps=3")
    assert message in str(caught.value)
    assert "job.yaml" in str(caught.value)


def test_a_missing_file_a_folder_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for name, message in (
        ("none.yaml", "No such file or directory"),
        (".", "Is a directory"),
        ("bytes.yaml", "it is not UTF-8 text"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            Job.read(tmp_path / name)
        assert str(tmp_path) in str(caught.value)


def test_numbers_without_a_point_are_numbers(tmp_path: Path) -> None:
    """PyYAML reads 1e-3 as text; everybody writes learning rates like that."""
    text = yaml.safe_dump(MINIMAL | {"train": None}).replace(
        "train: null", "train: {global_batch: 8, steps: 5, optimizer: {name: SGD, lr: 1e-3, momentum: 9E-1}}"
    )
    assert read(tmp_path, text).train.optimizer.arguments == {"lr": 0.001, "momentum": 0.9}


def test_paths_are_looked_up_beside_the_job_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path)
    folder.cluster(2, 1)
    monkeypatch.chdir(Path(__file__).parent)
    found = Job.read(folder.job())
    assert found.cluster == str(tmp_path / "cluster.yaml")
    assert found.profile == "profile.json"  # nowhere: left as it was written, for the message
    cluster = found.read_cluster()
    assert cluster is not None
    assert [d.id for d in cluster.devices] == ["n0/0", "n0/1", "n1/0"]
    with pytest.raises(InputError, match="cannot read profile.json: No such file"):
        found.check_files()


def test_files_are_compared_with_each_other(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    file = folder.ready()
    Job.read(file).check_files()
    folder.cluster(3)
    with pytest.raises(InputError, match="it was made for another cluster: the cluster has no device 'n1/0'"):
        Job.read(file).check_files()
    folder.cluster(2, 1)
    with pytest.raises(InputError, match="its global batch is 12, but 13 is asked for"):
        Job.read(file, ["train.global_batch=13"]).check_files()
    folder.profile(file, types=["gpu"])
    with pytest.raises(InputError, match="no measurement of device type 'cpu'; did you mean 'gpu'"):
        Job.read(file).check_files()


def test_the_tiny_job_of_these_tests(tmp_path: Path) -> None:
    assert train(steps=None, epochs=2)["epochs"] == 2
    assert Job.read(Folder(tmp_path).job(train=train(steps=None, epochs=2))).train.steps is None
