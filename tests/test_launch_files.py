"""`hetpipe launch`: each launcher is read back, and starts the nodes of the cluster file, in its order, with their devices."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetpipe.documents.cluster import Cluster
from hetpipe.exchange.launch import TARGETS, Asked
from hetpipe.exchange.launch.asked import MOST_NAME, NAME, default_name
from hetpipe.exchange.launch.hosts import hosts_of
from hetpipe.exchange.launch.kinds import kinds_of
from hetpipe.files.messages import InputError
from tests.support.commands import Command
from tests.support.jobs import Folder
from tests.support.launchers import JobSet, Line, SkyGroup, SkyTask, StandInRay, expanded, places, torchruns
from tests.support.strategies import make_cluster

TRAIN = ("hetpipe", "train", "job.yaml")
NODES = make_cluster([{"a100": 4}, {"t4": 1}, {"a100": 4}])  # two kinds, and the first kind is not all in one piece
LABELS = {"a100": "NVIDIA-A100", "t4": "Tesla-T4", "cpu": ""}
SPACED = ("hetpipe", "finetune", "my model", "$(touch evil)", "a'b\"c", "$HOME", "$$(X)", "`id`", "two\nlines", "-- ;")

one_type = st.dictionaries(st.sampled_from(["a100", "t4", "cpu"]), st.integers(1, 8), min_size=1, max_size=1)
any_types = st.dictionaries(st.sampled_from(["a100", "t4", "cpu"]), st.integers(1, 8), min_size=1, max_size=3)
alike = st.lists(one_type, min_size=1, max_size=6).map(make_cluster)
mixed = st.lists(any_types, min_size=1, max_size=6).map(make_cluster)
drawn = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


def asked(**more: Any) -> Asked:
    return Asked(**({"command": TRAIN} | more))


def agree(lines: list[Line], cluster: Cluster, program: tuple[str, ...] = ("-m", *TRAIN)) -> None:
    """The nodes are those of the cluster file; all meet at one address."""
    assert sorted(line.place for line in lines) == places(cluster)
    assert {line.options["--nnodes"] for line in lines} == {str(len(cluster.nodes))}
    assert len({(line.options["--master-addr"], line.options["--master-port"]) for line in lines}) == 1
    assert all(line.program == list(program) for line in lines)


class TestSlurm:
    @given(mixed)
    @drawn
    def test_components_are_the_kinds_of_nodes(self, tmp_path: Path, cluster: Cluster) -> None:
        script = TARGETS["slurm"](cluster, asked())
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        agree(lines := torchruns(script, tmp_path / "bin", "bash"), cluster)
        components = self.components(script)
        assert [int(each["--nodes"]) for each in components] == [len(kind.ranks) for kind in kinds_of(cluster)]
        wanted = Counter[tuple[str, int]]()
        for node in cluster.nodes:
            wanted.update(node.devices.items())
        wanted = Counter({key: count for key, count in wanted.items() if key[0] != "cpu"})
        found = Counter[tuple[str, int]]()
        for each in components:
            for part in filter(None, each.get("--gres", "").split(",")):
                _, name, count = part.split(":")
                found[name, int(count)] += int(each["--nodes"])
        assert found == wanted
        assert {each["--ntasks-per-node"] for each in components} == {"1"}
        list_of_first = "SLURM_JOB_NODELIST_HET_GROUP_0" if len(components) > 1 else "SLURM_JOB_NODELIST"
        assert f"${list_of_first}" in script
        assert lines[0].options["--master-addr"] == "first of "

    @staticmethod
    def components(script: str) -> list[dict[str, str]]:
        """The options of each component, of the lines before the first command, as sbatch reads them."""
        found: list[dict[str, str]] = [{}]
        for line in script.splitlines()[1:]:
            if not line.startswith("#"):
                break
            words = shlex.split(line.removeprefix("#SBATCH ")) if line.startswith("#SBATCH ") else []
            if words == ["hetjob"]:
                found.append({})
            else:
                found[-1] |= dict(word.split("=", 1) for word in words)
        return found

    def test_nodes_of_a_kind_need_not_follow_each_other(self) -> None:
        script = TARGETS["slurm"](NODES, asked(name="gpt"))
        big, small = self.components(script)
        assert big == {
            "--job-name": "gpt",
            "--nodes": "2",
            "--ntasks-per-node": "1",
            "--gres": "gpu:a100:4",
            "--cpus-per-task": "16",
            "--signal": "TERM@120",
        }
        assert small["--gres"] == "gpu:t4:1"
        assert 'set -- 0 2; shift "$SLURM_PROCID"' in script
        assert script.count("--het-group=0") == script.count("--het-group=1") == 1

    @pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((3, 0), 3), ((0, 4), 4), ((5, 6), 5)])
    def test_the_script_ends_with_the_code_of_the_first_that_failed(
        self, tmp_path: Path, codes: tuple[int, int], expected: int
    ) -> None:
        srun = f'srun() {{ [[ "$1" == --het-group=0 ]] && return {codes[0]}; return {codes[1]}; }}; scontrol() {{ echo n; }}\n'
        done = subprocess.run(["bash", "-c", srun + TARGETS["slurm"](NODES, asked())], check=False)
        assert done.returncode == expected

    def test_hosts_of_the_cluster_file_are_asked_for(self) -> None:
        nodes = tuple(node.model_copy(update={"host": f"gpu{i}"}) for i, node in enumerate(NODES.nodes))
        big, small = self.components(TARGETS["slurm"](NODES.with_nodes(nodes), asked()))
        assert (big["--nodelist"], small["--nodelist"]) == ("gpu0,gpu2", "gpu1")

    def test_a_host_name_is_no_line_of_the_script(self) -> None:
        nodes = tuple(node.model_copy(update={"host": "x\ntouch evil"}) for node in NODES.nodes)
        with pytest.raises(InputError, match=r"machine 'x\\ntouch evil', which is no host name or address"):
            TARGETS["slurm"](NODES.with_nodes(nodes), asked())


class TestJobSet:
    @given(alike)
    @drawn
    def test_every_node_is_a_pod(self, tmp_path: Path, cluster: Cluster) -> None:
        name = "x" * MOST_NAME
        found = self.read(TARGETS["jobset"](cluster, asked(image="me/hetpipe:1", name=name, types=self.labels(cluster))))
        pods = found.pods()
        lines = {host: self.torchrun(pod.containers[0].command, index, tmp_path) for host, (pod, index) in pods.items()}
        agree(list(lines.values()), cluster)
        master = lines[next(iter(lines))].options["--master-addr"]
        assert lines[master].place[0] == 0, "the address is that of the pod of node 0"
        for host, (pod, _) in pods.items():
            ((kind, count),) = cluster.nodes[lines[host].place[0]].devices.items()
            resources = pod.containers[0].resources
            assert (resources.limits if resources else {}) == ({} if kind == "cpu" else {"nvidia.com/gpu": count})
            assert pod.node_selector == (None if kind == "cpu" else {"nvidia.com/gpu.product": LABELS[kind]})

    @staticmethod
    def read(text: str) -> JobSet:
        return JobSet.model_validate(yaml.safe_load(text))

    @staticmethod
    def labels(cluster: Cluster) -> dict[str, str]:
        return {kind: LABELS[kind] for kind in cluster.device_types}

    @staticmethod
    def torchrun(command: list[str], index: int, folder: Path) -> Line:
        """What a container of this command starts."""
        variables = {"JOB_COMPLETION_INDEX": str(index)}
        shell, option, script = (expanded(word, variables | {"X": "a variable of the pod"}) for word in command)
        assert (shell, option) == ("sh", "-c")
        (line,) = torchruns(script, folder / "bin", **variables)
        return line

    def test_kubernetes_replaces_nothing_in_the_command(self, tmp_path: Path) -> None:
        pods = self.read(TARGETS["jobset"](make_cluster([{"a100": 1}]), asked(command=SPACED, image="i"))).pods()
        ((pod, _),) = pods.values()
        assert self.torchrun(pod.containers[0].command, 0, tmp_path).program == ["-m", *SPACED]
        assert pod.node_selector is None, "all devices are alike"

    def test_another_label_and_folder(self) -> None:
        types = {"a100": "cloud.google.com/gke-accelerator=nvidia-tesla-a100", "t4": "pool=t4"}
        found = self.read(TARGETS["jobset"](NODES, asked(image="i", types=types, folder="/data/my job")))
        big, small = (job.template.spec.template.spec for job in found.spec.replicated_jobs)
        assert big.node_selector == {"cloud.google.com/gke-accelerator": "nvidia-tesla-a100"}
        assert small.node_selector == {"pool": "t4"}
        assert big.containers[0].working_dir == "/data/my job"


class TestSkyPilot:
    @given(alike)
    @drawn
    def test_every_kind_of_node_is_a_task(self, tmp_path: Path, cluster: Cluster) -> None:
        documents = list(yaml.safe_load_all(TARGETS["skypilot"](cluster, asked())))
        tasks = [SkyTask.model_validate(each) for each in (documents[1:] if len(documents) > 1 else documents)]
        assert len(tasks) == len(kinds_of(cluster)) == len({task.name for task in tasks})
        lines = []
        for task in tasks:
            for index in range(task.num_nodes):
                variables = {
                    "SKYPILOT_NODE_RANK": str(index),
                    "SKYPILOT_NODE_IPS": "\n".join(f"{task.name}-{i}.hetpipe" for i in range(task.num_nodes)),
                    "SKYPILOT_JOBGROUP_NAME": "hetpipe",  # without a job group the task has its name
                }
                (line,) = torchruns(task.run, tmp_path / "bin", "bash", **variables)
                lines.append(line)
                ((kind, count),) = cluster.nodes[line.place[0]].devices.items()
                wanted = (None, f"{4 * count}+") if kind == "cpu" else (f"{kind}:{count}", None)
                assert (task.resources.accelerators, task.resources.cpus) == wanted
        agree(lines, cluster)
        if len(tasks) > 1:
            assert SkyGroup.model_validate(documents[0]).name == "hetpipe"

    def test_an_image_and_names_of_its_own(self) -> None:
        text = TARGETS["skypilot"](NODES, asked(image="me/hetpipe:1", types={"a100": "A100-80GB"}))
        big, small = (SkyTask.model_validate(each).resources for each in list(yaml.safe_load_all(text))[1:])
        assert (big.accelerators, small.accelerators) == ("A100-80GB:4", "t4:1")
        assert big.image_id == small.image_id == "docker:me/hetpipe:1"


class TestRay:
    @staticmethod
    def main(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, codes: list[int], **more: Any) -> tuple[int, StandInRay]:
        """Run the script over a Ray that runs a task when its result is asked for."""
        ray, names = StandInRay(codes), dict[str, Any](__name__="script")
        with monkeypatch.context() as patched:
            for name, module in ray.modules().items():
                patched.setitem(sys.modules, name, module)
            exec(compile(TARGETS["ray"](cluster, asked(**more)), "script.py", "exec"), names)
        return names["main"](), ray

    @given(mixed)
    @drawn
    def test_a_bundle_is_a_node(self, monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
        code, ray = self.main(monkeypatch, cluster, [0] * len(cluster.nodes))
        assert (code, ray.strategy, ray.cancelled) == (0, "STRICT_SPREAD", [])
        for rank, node in enumerate(cluster.nodes):
            real = {kind: count for kind, count in node.devices.items() if kind != "cpu"}
            bundle = dict(ray.bundles[rank])
            assert bundle.pop("CPU") == 4 * sum(node.devices.values())
            assert bundle.pop("GPU", 0) == sum(real.values())
            assert bundle == ({f"accelerator_type:{kind}": 0.001 for kind in real} if len(real) == 1 else {})
        assert [words[1:3] for words in ray.started.values()] == [["-m", "torch.distributed.run"]] * len(cluster.nodes)
        options = [dict(zip(words[3:13:2], words[4:13:2], strict=True)) for words in ray.started.values()]
        agree([Line(found, words[13:]) for found, words in zip(options, ray.started.values(), strict=True)], cluster)

    def test_a_failure_ends_the_others(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        code, ray = self.main(monkeypatch, NODES, [0, -9, 1], command=SPACED)
        assert code == 128 + 9
        assert len(ray.cancelled) == 1
        assert "node 1 ended with exit code 137; the others are stopped" in capsys.readouterr().err
        assert ray.started[0][13:] == ["-m", *SPACED]


class TestHosts:
    @given(mixed)
    @drawn
    def test_a_line_of_ssh_for_each_node(self, tmp_path: Path, cluster: Cluster) -> None:
        text = TARGETS["hosts"](cluster, asked(folder=str(tmp_path), hosts={"n0": "me@10.0.0.1"}))
        lines = []
        for words in map(shlex.split, text.splitlines()):
            ssh, _, there = words
            assert ssh == "ssh"
            lines += torchruns(there, tmp_path / "bin")
        agree(lines, cluster)
        assert [shlex.split(line)[1] for line in text.splitlines()] == ["me@10.0.0.1", *(n.name for n in cluster.nodes[1:])]
        assert lines[0].options["--master-addr"] == "10.0.0.1"

    def test_the_host_of_the_cluster_file(self) -> None:
        nodes = tuple(node.model_copy(update={"host": f"gpu{i}"}) for i, node in enumerate(NODES.nodes))
        found = hosts_of(NODES.with_nodes(nodes), asked(hosts={"n1": "other"}, master="eth1.gpu0"))
        assert [host.address for host in found] == ["gpu0", "other", "gpu2"]
        assert all("--master-addr eth1.gpu0 " in host.line for host in found)


@pytest.mark.parametrize("target", ["slurm", "skypilot", "hosts"])
def test_words_of_the_command_arrive_as_they_are(tmp_path: Path, target: str) -> None:
    """Nothing in them is evaluated."""
    cluster = make_cluster([{"a100": 1}])
    text = TARGETS[target](cluster, asked(command=SPACED, folder=str(tmp_path)))
    script = yaml.safe_load(text)["run"] if target == "skypilot" else text
    script = shlex.split(text)[2] if target == "hosts" else script
    (line,) = torchruns(script, tmp_path / "bin", "bash", SKYPILOT_NODE_IPS="a")
    assert line.program == ["-m", *SPACED]
    assert not list(tmp_path.rglob("evil"))


@given(st.text(max_size=60))
def test_every_file_name_gives_a_name(stem: str) -> None:
    assert NAME.fullmatch(default_name(stem))


class TestCommand:
    def test_it_writes_a_file_and_says_where_paths_begin(self, run: Command, folder: Folder) -> None:
        folder.cluster(2, 1)
        folder.job(profile=None, plan=None)
        found = run("launch", "job.yaml", "--to", "slurm", "-o", "job.slurm", "--set", "train.steps=3")
        where = "begin on each machine in the folder in which you call sbatch"
        assert found == (0, "", f"note: relative paths (job.yaml, cluster.yaml) {where}\n")
        (line, _) = torchruns((folder.path / "job.slurm").read_text(), folder.path / "bin", "bash")
        assert line.program == ["-m", "hetpipe", "train", "job.yaml", "--set", "train.steps=3"]

    def test_another_command(self, run: Command, folder: Folder) -> None:
        folder.cluster(2, 1)
        folder.job()
        own = ["hetpipe", "finetune", "MODEL", "--lora", "d ata"]
        found = run("launch", "job.yaml", "--to", "hosts", "--folder", "/x", "--", *own)
        assert (found.code, found.err) == (0, "")
        there = shlex.split(shlex.split(found.out.splitlines()[0])[2])
        assert there[-len(own) - 1 :] == ["-m", *own]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ((), "--to is missing: slurm, jobset, ray, skypilot, hosts"),
            (("--to", "slrum"), "unknown system 'slrum'; did you mean 'slurm'? known: slurm, jobset"),
            (("--to", "jobset"), "--to jobset needs --image, a container image that has hetpipe"),
            (("--to", "slurm", "--image", "x"), "--image is for --to jobset or skypilot, and not for slurm. Leave it out"),
            (("--to", "slurm", "--run"), "--run is for --to hosts, and not for slurm. Leave it out"),
            (("--to", "hosts", "--run", "-o", "x"), "--run starts the hosts, and -o writes their commands to a file"),
            (("--to", "hosts", "--host", "n9=x"), "--host: cluster.yaml has no 'n9'; did you mean 'n1'? known: n0, n1"),
            (("--to", "hosts", "--host", "n0"), "cannot read --host 'n0'. Write NAME=VALUE"),
            (("--to", "slurm", "--type", "gpu=x"), "--type: cluster.yaml has no 'gpu'; did you mean 'cpu'? known: cpu"),
            (("--to", "slurm", "--type", "cpu=a b"), "a launcher cannot ask for devices of type 'a b'"),
            (("--to", "slurm", "--type", "cpu=a", "--type", "cpu=b"), "--type says two things of 'cpu': 'a' and 'b'"),
            (("--to", "hosts", "--ssh", "ssh '"), 'cannot read --ssh "ssh \'": No closing quotation'),
            (("--to", "hosts", "--host", "n1=-oX=y"), "node 'n1' is for the machine '-oX=y', which is no host name or address"),
            (("--to", "hosts", "--master-addr", "a b"), "node 'n0' is for the machine 'a b', which is no host name or address"),
            (("--to", "slurm", "--name", "A"), "--name is 'A', but a job's name has lower-case letters, digits and hyphens"),
            (("--to", "slurm", "--set", "cluster="), "job.yaml names no cluster file, so it is not known which nodes there are"),
            (
                ("--to", "hosts", "--run", "--ssh", "no-such-ssh"),
                "cannot start 'no-such-ssh' (--ssh) for node 'n0': No such file",
            ),
        ],
    )
    def test_what_is_refused(self, run: Command, folder: Folder, words: tuple[str, ...], message: str) -> None:
        folder.cluster(2, 1)
        folder.job()
        found = run("launch", "job.yaml", *words)
        assert (found.code, found.out) == (2, "")
        assert f"error: {message}" in found.err

    def test_emulated_devices_have_nothing_to_launch(self, run: Command, folder: Folder) -> None:
        folder.cluster(2, 1, slowdown=2.0)
        folder.job()
        found = run("launch", "job.yaml", "--to", "slurm")
        assert found.code == 2
        assert "cluster.yaml has emulated devices ('cpu'), which are processes of one machine" in found.err


@pytest.mark.parametrize(
    ("target", "nodes", "more", "message"),
    [
        (
            "jobset",
            [{"a": 1}, {"b": 1}],
            {"image": "i"},
            r"--type a=PRODUCT, where PRODUCT is the value of nvidia.com/gpu.product",
        ),
        ("jobset", [{"a": 1, "b": 1}], {"image": "i", "types": {"a": "A", "b": "B"}}, r"chosen by one label, but --type gives 1"),
        ("skypilot", [{"a": 1, "b": 1}], {}, r"SkyPilot rents nodes with one type of device, but 'n0' has 'a' and 'b'"),
        ("slurm", [{"a\nb": 1}], {}, "cannot ask for devices of type 'a\\nb'"),
    ],
)
def test_what_a_system_cannot_ask_for(target: str, nodes: list[dict[str, int]], more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        TARGETS[target](make_cluster(nodes), asked(**more))


@pytest.mark.parametrize(("target", "system"), [("jobset", "Kubernetes"), ("skypilot", "SkyPilot")])
def test_where_machines_get_names_of_their_own(target: str, system: str) -> None:
    cluster = NODES.with_nodes(node.model_copy(update={"host": "gpu0"}) for node in NODES.nodes)
    with pytest.raises(InputError, match=f"node 'n0' is bound to the machine 'gpu0' by its 'host', but {system} gives machines"):
        TARGETS[target](cluster, asked(image="i"))
