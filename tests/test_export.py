from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.documents.cluster import Cluster
from hetpipe.documents.plan import Plan
from hetpipe.exchange.export import Export, export, parse_blocks
from hetpipe.files.messages import InputError
from tests.support.small_plans import IRREGULAR, REGULAR, make_plan, plans
from tests.support.strategies import make_cluster

CLUSTER = make_cluster([{"a": 2}, {"b": 2}])


def arguments(found: Export) -> list[str]:
    """The words of the PLAN array of a Megatron script."""
    return shlex.split(found.text.split("PLAN=(")[1].split("\n)")[0])


def bash(found: Export, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script with torchrun replaced by echo."""
    text = f'torchrun() {{ echo torchrun "$@"; }}\n{found.text}'
    return subprocess.run(["bash", "-c", text, "script", *words], capture_output=True, text=True, check=False)


class TestMegatron:
    def test_regular_plan_loses_nothing(self) -> None:
        found = export(REGULAR, "megatron")
        assert found.lost == ()
        assert arguments(found) == shlex.split(
            "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --num-layers 4 "
            "--micro-batch-size 2 --global-batch-size 8"
        )
        assert "Nothing of the plan is lost in Megatron-LM" in found.text

    def test_each_node_has_its_line(self) -> None:
        found = export(REGULAR, "megatron")
        assert bash(found, "n1").stdout == (
            "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr n0 --master-port 29500 pretrain_gpt.py "
            + " ".join(arguments(found))
            + "\n"
        )
        wrong = bash(found, "n9")
        assert wrong.returncode == 2
        assert "give a node: n0 n1" in wrong.stderr

    def test_pipelines_inside_nodes_need_the_other_order_of_ranks(self) -> None:
        """n0 holds replica 0 and n1 replica 1: stages are neighbours, not replicas."""
        plan = make_plan(([2, 2], [(0, 3, "n0/0"), (3, 6, "n0/1")]), ([2, 2], [(0, 3, "n1/0"), (3, 6, "n1/1")]))
        found = export(plan, "megatron")
        assert "--use-tp-pp-dp-mapping" in arguments(found)
        assert found.lost == ()

    def test_local_ranks_follow_the_stages(self) -> None:
        plan = make_plan(([2, 2], [(0, 3, "n0/1"), (3, 6, "n0/0")]))
        found = export(plan, "megatron")
        assert "CUDA_VISIBLE_DEVICES=1,0 torchrun" in found.text
        assert found.lost == ()

    def test_a_pipeline_that_returns_to_a_node_is_said(self) -> None:
        plan = make_plan(([1] * 3, [(0, 2, "n0/0"), (2, 4, "n1/0"), (4, 6, "n0/1")]))
        lost = " ".join(export(plan, "megatron").lost)
        assert "the place of n0/1: stage 2 of replica 0 in the plan, here stage 1" in lost

    @pytest.mark.parametrize(
        ("ends", "expected"),
        [
            ([4, 6], ["--decoder-first-pipeline-num-layers", "3"]),
            ([4, 6, 9, 12], ["--pipeline-model-parallel-layout", "Et*3|t*2|t*3|t*2L"]),
            ([2, 5, 8, 12], ["--decoder-first-pipeline-num-layers", "1"]),
            ([4, 6, 8, 12], ["--decoder-first-pipeline-num-layers", "3", "--decoder-last-pipeline-num-layers", "3"]),
            ([1, 4, 6], ["--pipeline-model-parallel-layout", "E|t*3|tL"]),
            ([3, 5, 8], []),
        ],
    )
    def test_uneven_cuts(self, ends: list[int], expected: list[str]) -> None:
        """Blocks per stage without the embedding (layer 0) and the head (the last)."""
        begins = [0, *ends[:-1]]
        plan = make_plan(([1] * 8, [(a, b, f"n0/{i}") for i, (a, b) in enumerate(zip(begins, ends, strict=True))]))
        found = export(plan, "megatron")
        words = arguments(found)
        after = words[words.index("--num-layers") + 2 : words.index("--micro-batch-size")]
        assert after == expected
        assert found.lost == ()

    def test_blocks_may_be_given(self) -> None:
        words = arguments(export(REGULAR, "megatron", blocks=(0, 6)))
        assert words[words.index("--num-layers") + 1] == "6"
        with pytest.raises(InputError, match=r"--blocks 3:9 is outside of the plan's 6 layers"):
            export(REGULAR, "megatron", blocks=(3, 9))

    def test_everything_that_is_lost_is_said(self) -> None:
        lost = "\n".join(export(IRREGULAR, "megatron", cluster=CLUSTER).lost)
        for part in (
            "a depth per replica: the plan's have [1, 2] stages, here all have 2",
            "1 of the plan's 3 devices",
            "unequal shares of the batch: the plan's replicas take [11, 2]",
            "micro-batches of unequal size: the plan has [2, 3, 4]",
            "micro-batches of 4: the batch must be a multiple of micro-batch × 1 replica; here 1",
            "unequal devices: it takes a, b to be equally fast",
        ):
            assert part in lost

    def test_cuts_per_replica(self) -> None:
        plan = make_plan(([2] * 3, [(0, 4, "n0/0"), (4, 6, "n1/0")]), ([2], [(0, 2, "n0/1"), (2, 6, "n1/1")]))
        lost = "\n".join(export(plan, "megatron").lost)
        assert "different cuts per replica: the plan's are [[0, 2, 6], [0, 4, 6]], here all have [0, 4, 6]" in lost

    def test_schedule_and_recompute(self) -> None:
        document = json.loads(REGULAR.to_json())
        document["replicas"][0]["stages"][0] |= {"warmup": 1, "recompute": True}
        document["replicas"][0]["stages"][1]["warmup"] = 1
        found = export(Plan.parse(document, "plan"), "megatron")
        assert "warm-up depths: replica 0 has [1, 1]" in found.lost[1]
        assert "recompute per stage: the plan has it on 1 of 4 stages" in found.lost[0]
        assert "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1" in found.text
        gpipe = export(REGULAR.model_copy(update={"schedule": "gpipe"}), "deepspeed")
        assert "warm-up depths: replica 0 has [2, 2]" in gpipe.lost[0]

    def test_a_batch_that_does_not_divide(self) -> None:
        plan = make_plan(([3], [(0, 6, "n0/0")]), ([2], [(0, 6, "n0/1")]))
        found = export(plan, "megatron")
        assert "--global-batch-size 4" in found.text
        assert any("a global batch of 5: it is no multiple of 2 replicas; here 4" in item for item in found.lost)

    def test_tensor_parallel(self) -> None:
        plan = make_plan(([2, 2], [(0, 3, "n0/0 n0/1"), (3, 6, "n1/0 n1/1")]))
        found = export(plan, "megatron")
        assert arguments(found)[:4] == ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
        assert found.lost == ()


class TestDeepspeed:
    def test_config_and_hosts(self) -> None:
        cluster = json.loads(CLUSTER.to_json())
        cluster["nodes"][1]["host"] = "b.example"
        found = export(REGULAR, "deepspeed", cluster=Cluster.parse(cluster, "cluster"))
        assert "n0 slots=2\nb.example slots=2" in found.text
        assert "--include=n0:0,1@b.example:0,1" in found.text
        config = json.loads(found.text.split("ds_config.json <<'END'\n")[1].split("\nEND")[0])
        assert config["train_batch_size"] == 8
        assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 2 == 8
        assert "num_stages=2" in found.text
        assert found.lost == ("unequal devices: it takes a, b to be equally fast and to have the same memory",)

    def test_cuts_are_lost(self) -> None:
        plan = make_plan(([1] * 4, [(0, 5, "n0/0"), (5, 6, "n0/1")]))
        assert "given cuts: partition_method knows uniform" in export(plan, "deepspeed").lost[0]


class TestTorchrun:
    def test_runs_the_plan_itself(self) -> None:
        found = export(IRREGULAR, "torchrun", cluster=CLUSTER)
        assert found.lost == ()
        assert bash(found, "n1").stdout == (
            "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr n0 --master-port 29500 "
            "-m hetpipe train JOB.yaml --plan PLAN.json\n"
        )
        assert "processes of devices without a stage wait: n1/1" in found.text

    def test_without_a_cluster_file_local_ranks_reach_the_indices(self) -> None:
        plan = make_plan(([2, 2], [(0, 6, "n0/3")]))
        assert "--nproc-per-node 4" in export(plan, "torchrun").text


class TestInput:
    def test_unknown_system(self) -> None:
        with pytest.raises(InputError, match="unknown system 'megatrn'; did you mean 'megatron'"):
            export(REGULAR, "megatrn")

    def test_another_cluster(self) -> None:
        with pytest.raises(InputError, match="made for another cluster"):
            export(REGULAR, "megatron", cluster=make_cluster([{"a": 1}]))

    def test_blocks(self) -> None:
        assert parse_blocks("1:25") == (1, 25)
        assert parse_blocks(None) is None
        for text in ("1-25", "1:", "a:b", "-1:5", "1:²", f"1:{'9' * 5_000}"):
            with pytest.raises(InputError, match="Write LO:HI"):
                parse_blocks(text)


@settings(deadline=None)
@given(plans(), st.sampled_from(["megatron", "deepspeed", "torchrun"]))
def test_any_plan_gives_a_consistent_grid(plan: Plan, target: str) -> None:
    cluster = make_cluster([{"a": 3}, {"a": 3}, {"a": 3}])
    found = export(plan, target, cluster=cluster)
    assert found.text.startswith("#!/usr/bin/env bash\n")
    assert all(f"#   - {item}\n" in found.text for item in found.lost)
    if target == "megatron":
        words = dict(zip(arguments(found)[::2], arguments(found)[1::2], strict=False))
        pp, micro, batch = (
            int(words[f"--{name}"]) for name in ("pipeline-model-parallel-size", "micro-batch-size", "global-batch-size")
        )
        ranks = sum(int(part.split()[0]) for part in found.text.split("--nproc-per-node ")[1:])
        assert ranks % pp == 0
        assert batch % (micro * (ranks // pp)) == 0


def test_command(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from hetpipe.cli.commands import app

    REGULAR.save(tmp_path / "plan.json")
    script = tmp_path / "launch.sh"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "plan.json"), "--to", "megatron", "-o", str(script), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["text"] == script.read_text() == export(REGULAR, "megatron").text
