"""Wrong files and wrong arguments, which commands refuse before any rank starts, with a line that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from typer.main import get_command

from hetpipe.cli.commands import app
from tests.support.commands import Command
from tests.support.jobs import PLANNING, Folder, train


def change(document: Any, **keys: Any) -> Any:
    return {**document, **keys}


def wrong_key(folder: Folder) -> None:
    folder.job(trian={})


def wrong_key_inside(folder: Folder) -> None:
    folder.job(train=train(optimiser={"name": "SGD"}))


def other_cluster(folder: Folder) -> None:
    folder.cluster(3)


def uncovered(folder: Folder) -> None:
    plan = folder.read("plan.json")
    plan["replicas"][0]["stages"][1]["layers"] = [5, 6]
    folder.write("plan.json", plan)


def other_batch(folder: Folder) -> None:
    folder.job(train=train(global_batch=16))


def wrong_sum(folder: Folder) -> None:
    folder.write("plan.json", change(folder.read("plan.json"), global_batch=13))


def type_not_measured(folder: Folder) -> None:
    cluster = yaml.safe_load((folder.path / "cluster.yaml").read_text())
    cluster["device_types"]["gpu"] = {"memory": "1 GiB"}
    cluster["nodes"].append({"name": "n2", "devices": {"gpu": 1}})
    folder.write("cluster.yaml", cluster)


def no_links(folder: Folder) -> None:
    cluster = yaml.safe_load((folder.path / "cluster.yaml").read_text())
    del cluster["link"]
    for node in cluster["nodes"]:
        del node["link"]
    folder.write("cluster.yaml", cluster)


def cluster_is_a_list(folder: Folder) -> None:
    folder.write("cluster.yaml", [1, 2])


def empty_profile(folder: Folder) -> None:
    (folder.path / "profile.json").write_text("")


def no_plan(folder: Folder) -> None:
    (folder.path / "plan.json").unlink()


def unknown_type_in_cluster(folder: Folder) -> None:
    cluster = yaml.safe_load((folder.path / "cluster.yaml").read_text())
    cluster["nodes"][0]["devices"] = {"cpuu": 2}
    folder.write("cluster.yaml", cluster)


def other_model(folder: Folder) -> None:
    folder.plan(model="gpt")


def unknown_model(folder: Folder) -> None:
    folder.job(model={"name": "mpl"})


def unknown_data(folder: Folder) -> None:
    folder.job(data={"name": "text5"})


WRONG = [
    (unknown_model, "unknown model 'mpl'; did you mean 'mlp'? known: "),
    (unknown_data, "unknown data 'text5'; did you mean 'text'? known: "),
    (wrong_key, "top level: unknown key 'trian'; did you mean 'train'?"),
    (wrong_key_inside, "train: unknown key 'optimiser'; did you mean 'optimizer'?"),
    (other_cluster, "it was made for another cluster: the cluster has no device 'n1/0'; did you mean 'n0/0'?"),
    (uncovered, "stage 1 has layers [5, 6), expected a range that starts at 4 and is not empty"),
    (other_batch, "its global batch is 12, but 16 is asked for (train.global_batch or --global-batch)"),
    (wrong_sum, "the micro-batches of all replicas sum to 12 samples, but global_batch is 13"),
    (type_not_measured, "the profile of 'mlp' has no measurement of device type 'gpu'"),
    (cluster_is_a_list, "cluster.yaml: expected a mapping with the key 'format', found a list"),
    (empty_profile, "profile.json is not valid JSON"),
    (no_plan, "cannot read plan.json: No such file or directory"),
    (unknown_type_in_cluster, "node 'n0': unknown device type 'cpuu'; did you mean 'cpu'?"),
    (other_model, "it is for model 'gpt', the profile for 'mlp'"),
]


@pytest.mark.parametrize(("spoil", "message"), WRONG, ids=[spoil.__name__ for spoil, _ in WRONG])
def test_train_with_wrong_files_ends_with_2_before_any_rank_starts(
    run: Command, folder: Folder, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Folder], None], message: str
) -> None:
    spoil(folder)
    monkeypatch.setattr("hetpipe.training.start.start_ranks", lambda *_: pytest.fail("ranks were started"))
    found = run("train", "job.yaml")
    assert (found.code, found.out) == (2, "")
    assert message in found.err
    assert found.err.startswith("error: ")
    assert "Traceback" not in found.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "nowhere.yaml"), "cannot read nowhere.yaml: No such file or directory"),
        (("train", "."), "cannot read .: Is a directory"),
        (("profile", "job.yaml", "--set", "model.name=mpl"), "unknown model 'mpl'; did you mean 'mlp'?"),
        (("profile", "plan.json"), "plan.json: "),
        (("train", "job.yaml", "--set", "train.steps"), "Write key=value, for example train.steps=50"),
        (("train", "job.yaml", "--plan", "other.json"), "cannot read other.json: No such file or directory"),
        (("train", "cluster.yaml"), "its format is 'hetpipe.cluster/1', expected 'hetpipe.job/1'"),
        (("plan", *PLANNING, "--global-batch", "12", "--partitioner", "evn"), "unknown partitioner 'evn'; did you mean 'even'?"),
        (("plan", *PLANNING, "--global-batch", "12", "--csv", "x.csv"), "--csv and --plans are for fronts. To plan over all"),
        (("plan", "--profile", "job.yaml", "--cluster", "cluster.yaml", "--global-batch", "1"), "expected 'hetpipe.profile/1'"),
        (("simulate", "--plan", "profile.json", *PLANNING), "expected 'hetpipe.plan/1'"),
        (("show", "nowhere.json"), "cannot read nowhere.json: No such file or directory"),
        (("show", "plan.json", "-o", "plan.jpeg"), "plan.jpeg"),
        (("profile", "job.yaml", "-o", "job.yaml/profile.json"), "cannot write profile.json into the folder job.yaml: Not"),
        (
            ("plan", *PLANNING, "--global-batch", "12", "-o", "job.yaml/x/plan.json"),
            "cannot write plan.json into the folder job.yaml/x: Not a directory",
        ),
        (("schema", "plans"), "unknown format 'plans'; did you mean 'plan'? known: cluster, profile, plan, job"),
    ],
)
def test_wrong_arguments_end_with_2(run: Command, folder: Folder, arguments: tuple[str, ...], message: str) -> None:
    found = run(*arguments)
    assert (found.code, found.out) == (2, "")
    assert message in found.err
    assert "Traceback" not in found.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", *PLANNING), "--global-batch"),
        (("plan", *PLANNING, "--global-batch", "0"), "--global-batch"),
        (("plan", *PLANNING, "--global-batch", "12", "--schedule", "zb"), "zb"),
        (("trian", "job.yaml"), "No such command 'trian'"),
        (("train",), "Missing argument"),
    ],
)
def test_wrong_usage_ends_with_2(run: Command, folder: Folder, arguments: tuple[str, ...], message: str) -> None:
    found = run(*arguments)
    assert (found.code, found.out) == (2, "")
    assert message in found.err


def test_several_nodes_of_gpus_need_torchrun(run: Command, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine, local rank 0 of each node would get the same GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = run("train", "job.yaml")
    assert found.code == 2
    assert "real devices on the nodes ['n0', 'n1'], and this is one machine: start the command under torchrun" in found.err


def test_a_plan_for_another_cluster_or_without_links_cannot_be_simulated(run: Command, folder: Folder) -> None:
    no_links(folder)
    found = run("simulate", "--plan", "plan.json", *PLANNING)
    assert found.code == 2
    assert "no link is known inside node 'n0'" in found.err
    folder.cluster(3)
    found = run("simulate", "--plan", "plan.json", *PLANNING)
    assert found.code == 2
    assert "the cluster has no device 'n1/0'" in found.err


def test_every_option_of_every_command_says_what_it_is() -> None:
    found = {
        f"{name} --{parameter.name}": getattr(parameter, "help", "told")  # click has no help of arguments
        for name, command in get_command(app).commands.items()  # type: ignore[attr-defined]
        for parameter in command.params
    }
    assert len(found) > 50
    assert [name for name, text in found.items() if not text] == []
