"""Plans as other trainers read them: each file is read back, and says what the plan says."""

from __future__ import annotations

import json
import shlex
import tomllib
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.documents.plan import Plan
from hetpipe.exchange.export import Export, export
from hetpipe.files.messages import InputError
from tests.support.small_plans import IRREGULAR, REGULAR, make_plan, plans
from tests.support.strategies import make_cluster

ALIKE = make_cluster([{"a": 3}, {"a": 3}, {"a": 3}])
TRAINERS = ("torchtitan", "automodel", "flagscale", "diffusion-pipe", "accelerate")
REFUSED = {"automodel": "as many micro-batches as stages", "flagscale": "has no transformer block"}
ONE_NODE = make_plan(([2, 2, 2], [(0, 1, "n0/2"), (1, 5, "n0/0"), (5, 6, "n0/1")]))


class Read(NamedTuple):
    """What an exported file says: degrees, layers of each stage (blocks alone where a trainer counts those), batches."""

    dp: int
    pp: int
    tp: int
    counts: list[int]
    micro: int
    microbatches: int
    batch: int


def options(found: Export) -> dict[str, str]:
    """The options of a torchtitan script: name → value; several values joined by spaces."""
    lines = found.text.split("PLAN=(\n")[1].split("\n)")[0].splitlines()
    words = [shlex.split(line) for line in lines]
    return {name.removeprefix("--"): " ".join(values) for name, *values in words}


def blocks_in(stages: list[list[str]], prefix: str) -> list[int]:
    """How many blocks each stage has; they count through the stages from 0."""
    numbers = [[int(m.removeprefix(prefix)) for m in stage if m.startswith(prefix)] for stage in stages]
    assert [n for stage in numbers for n in stage] == list(range(sum(map(len, numbers))))
    return [len(stage) for stage in numbers]


def read_torchtitan(found: Export, blocks: int) -> Read:
    given = options(found)
    dp, pp, batch, local = (
        int(given[name])
        for name in (
            "parallelism.data_parallel_replicate_degree",
            "parallelism.pipeline_parallel_degree",
            "training.global_batch_size",
            "training.local_batch_size",
        )
    )
    assert batch % (local * dp) == 0
    counts, micro = [blocks], local
    if pp > 1:
        stages = [stage.split(",") for stage in given["parallelism.module_fqns_per_model_part"].split()]
        assert (stages[0][0], stages[-1][-2:]) == ("tok_embeddings", ["norm", "lm_head"])
        micro = int(given["parallelism.pipeline_parallel_microbatch_size"])
        assert local % micro == 0
        few = local // micro < pp
        assert given["parallelism.pipeline_parallel_schedule"] == ("GPipe" if few else "1F1B")
        assert any(item.startswith("1F1B: torch's wants") for item in found.lost) == few
        counts = blocks_in(stages, "layers.")
    return Read(dp, pp, int(given["parallelism.tensor_parallel_degree"]), counts, micro, batch // (dp * micro), batch)


def read_automodel(found: Export, blocks: int) -> Read:
    recipe = yaml.safe_load(found.text)
    scheduler, distributed = recipe["step_scheduler"], recipe["distributed"]
    dp, pp, batch, local = (
        distributed["dp_size"],
        distributed["pp_size"],
        scheduler["global_batch_size"],
        scheduler["local_batch_size"],
    )
    assert batch % (local * dp) == 0
    counts, micro = [blocks], local
    assert ("pipeline" in distributed) == (pp > 1)
    if pp > 1:
        stages, micro = distributed["pipeline"]["module_fqns_per_model_part"], distributed["pipeline"]["pp_microbatch_size"]
        assert stages[0][0] == "model.embed_tokens"
        assert stages[-1][-3:] == ["model.norm", "lm_head", "model.rotary_emb"]
        assert all("model.rotary_emb" in stage for stage in stages)
        assert local % micro == 0
        assert local // micro >= pp
        counts = blocks_in(stages, "model.layers.")
    return Read(dp, pp, distributed["tp_size"], counts, micro, batch // (dp * micro), batch)


def read_flagscale(found: Export, blocks: int) -> Read:
    config = yaml.safe_load(found.text)
    hetero, model = config["system"]["hetero"], config["model"]
    numbers = hetero["hetero_process_meshes"]
    meshes = [numbers[i : i + 5] for i in range(0, len(numbers), 5)]
    assert len(meshes) == len(hetero["hetero_device_types"])
    assert hetero["hetero_current_device_type"] in hetero["hetero_device_types"]
    assert sum(mesh[4] for mesh in meshes) == config["system"]["pipeline_model_parallel_size"]
    assert model["num_layers"] == sum(hetero["hetero_pipeline_layer_split"]) == blocks
    (dp,), (tp,) = {mesh[3] for mesh in meshes}, {mesh[0] for mesh in meshes}
    micro, batch = model["micro_batch_size"], model["global_batch_size"]
    pp = config["system"]["pipeline_model_parallel_size"]
    return Read(dp, pp, tp, hetero["hetero_pipeline_layer_split"], micro, batch // (dp * micro), batch)


def read_diffusion_pipe(found: Export, layers: int, dp: int) -> Read:
    config = tomllib.loads(found.text)
    cuts = [0, *config.get("partition_split", []), layers]
    assert (config.get("partition_method") == "manual") == (len(cuts) > 2)
    micro, microbatches = config["micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    counts = [b - a for a, b in pairwise(cuts)]
    return Read(dp, config["pipeline_stages"], 1, counts, micro, microbatches, micro * microbatches * dp)


def device_map_of(found: Export) -> dict[str, int]:
    names: dict[str, Any] = {}
    exec(found.text, names)  # what `import` of the file does
    found_map: dict[str, int] = names["device_map"]
    return found_map


@settings(deadline=None, max_examples=100)
@given(plans(alike=True), st.sampled_from(TRAINERS[:4]))
def test_a_plan_of_one_depth_is_read_back(plan: Plan, target: str) -> None:
    """Its degrees are its devices, its layers those of the model, and its batch is met, or what differs is said."""
    blocks = plan.layer_count - 2
    dp, pp = len(plan.replicas), len(plan.replicas[0].stages)
    try:
        found = export(plan, target, cluster=ALIKE)
    except InputError as error:
        if REFUSED.get(target, "nothing") in str(error):
            return
        raise
    read = {
        "torchtitan": lambda: read_torchtitan(found, blocks),
        "automodel": lambda: read_automodel(found, blocks),
        "flagscale": lambda: read_flagscale(found, blocks),
        "diffusion-pipe": lambda: read_diffusion_pipe(found, plan.layer_count, dp),
    }[target]()
    lost = "\n".join(found.lost)
    assert (read.dp, read.pp, read.tp) == (dp, pp, 1)
    assert read.dp * read.pp * read.tp == len(plan.device_ids)
    first, last = (0, plan.layer_count) if target == "diffusion-pipe" else (1, plan.layer_count - 1)
    assert sum(read.counts) == last - first
    cuts = [[max(0, min(b, last) - max(a, first)) for a, b in (stage.layers for stage in r.stages)] for r in plan.replicas]
    assert read.counts in cuts
    ends = {tuple(stage.layers for stage in r.stages) for r in plan.replicas}
    assert (len(ends) > 1) == ("different cuts per replica" in lost)
    assert read.micro * read.microbatches * read.dp == read.batch
    assert (read.batch == plan.global_batch) == ("a global batch of" not in lost)
    shares = {r.samples for r in plan.replicas}
    assert (len(shares) > 1) == ("unequal shares of the batch" in lost)
    sizes = {size for r in plan.replicas for size in r.microbatch_sizes}
    assert read.micro in sizes or "the batch must be a multiple of micro-batch" in lost
    assert all(f"#   - {item}\n" in found.text for item in found.lost)


@settings(deadline=None)
@given(plans(), st.sampled_from(TRAINERS))
def test_a_plan_of_which_nothing_would_be_left_is_refused(plan: Plan, target: str) -> None:
    depths = {len(replica.stages) for replica in plan.replicas}
    if target == "accelerate":
        refused = len(plan.replicas) > 1 or len({d.split("/")[0] for d in plan.device_ids}) > 1
        reason = r"holds one copy of the model|of one process on one host"
    else:
        refused, reason = len(depths) > 1, r"has one pipeline depth for all replicas.*plan with --partitioner even-pipelines"
    if refused:
        with pytest.raises(InputError, match=f"{reason}") as raised:
            export(plan, target, cluster=ALIKE)
        assert "`hetpipe train JOB.yaml --plan PLAN` runs the plan as it is" in str(raised.value)


@settings(deadline=None)
@given(st.data())
def test_a_device_map_gives_each_card_the_layers_of_its_stage(data: st.DataObject) -> None:
    """One pipeline on the cards of one node, in any order."""
    L = data.draw(st.integers(3, 9))
    cuts = sorted(data.draw(st.sets(st.integers(1, L - 1), max_size=3)))
    cards = data.draw(st.permutations(range(len(cuts) + 1)))
    stages = [(a, b, f"n0/{card}") for (a, b), card in zip(pairwise([0, *cuts, L]), cards, strict=True)]
    card_of = device_map_of(export(make_plan(([2, 2], stages)), "accelerate"))
    expected = [card for (a, b, _), card in zip(stages, cards, strict=True) for i in range(a, b) if 0 < i < L - 1]
    assert [card_of.pop(f"model.layers.{i}") for i in range(L - 2)] == expected
    first, last = cards[0], cards[-1]
    assert card_of == {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": last, "lm_head": last}


class TestTorchtitan:
    def test_options(self) -> None:
        found = export(REGULAR, "torchtitan")
        assert found.lost == ()
        assert options(found) == {
            "parallelism.data_parallel_replicate_degree": "2",
            "parallelism.data_parallel_shard_degree": "1",
            "parallelism.tensor_parallel_degree": "1",
            "parallelism.pipeline_parallel_degree": "2",
            "training.global_batch_size": "8",
            "training.local_batch_size": "4",
            "parallelism.pipeline_parallel_schedule": "1F1B",
            "parallelism.pipeline_parallel_microbatch_size": "2",
            "parallelism.module_fqns_per_model_part": "tok_embeddings,layers.0,layers.1 layers.2,layers.3,norm,lm_head",
        }

    def test_ranks_count_through_the_stages(self) -> None:
        """n0 has both first stages, n1 both last: the outermost dimension of its mesh is the pipeline."""
        assert "the place of" not in "".join(export(REGULAR, "torchtitan").lost)
        inside = make_plan(([2, 2], [(0, 3, "n0/0"), (3, 6, "n0/1")]), ([2, 2], [(0, 3, "n1/0"), (3, 6, "n1/1")]))
        assert (
            "the place of n0/1: stage 1 of replica 0 in the plan, here stage 0 of replica 1" in export(inside, "torchtitan").lost
        )

    def test_a_stage_without_a_block(self) -> None:
        """Layer 0 and layer 1 belong to the embedding, and are cut apart."""
        plan = make_plan(([1] * 4, [(0, 1, "n0/0"), (1, 2, "n0/1"), (2, 6, "n1/0")]))
        with pytest.raises(InputError, match=r"stage 1 has the layers \[1, 2\), and no transformer block, .* \[2, 5\)"):
            export(plan, "torchtitan", blocks=(2, 5))


class TestFlagScale:
    def test_meshes_follow_the_types(self) -> None:
        """Both replicas: a → a → b, so two meshes along the pipeline, of 2 × 2 and of 2 × 1 devices."""
        plan = make_plan(
            ([2, 2], [(0, 2, "n0/0"), (2, 4, "n0/2"), (4, 6, "n1/0")]), ([2, 2], [(0, 2, "n0/1"), (2, 4, "n0/3"), (4, 6, "n1/1")])
        )
        found = export(plan, "flagscale", cluster=make_cluster([{"a": 4}, {"b": 2}]))
        hetero = yaml.safe_load(found.text)["system"]["hetero"]
        assert hetero["hetero_process_meshes"] == [1, 1, 1, 2, 2, 1, 1, 1, 2, 1]
        assert hetero["hetero_device_types"] == ["a", "b"]
        assert hetero["hetero_pipeline_layer_split"] == [1, 2, 1]
        assert "#   n0 slots=4 type=a\n#   n1 slots=2 type=b\n" in found.text
        assert not [item for item in found.lost if "warm-up" not in item]

    def test_a_tensor_parallel_degree_for_each_type(self) -> None:
        plan = make_plan(([2, 2], [(0, 3, "n0/0 n0/1"), (3, 6, "n1/0")]))
        found = export(plan, "flagscale", cluster=make_cluster([{"a": 2}, {"b": 1}]))
        assert yaml.safe_load(found.text)["system"]["hetero"]["hetero_process_meshes"] == [2, 1, 1, 1, 1, 1, 1, 1, 1, 1]
        assert found.lost == ()

    def test_recompute_of_some_stages_is_said_not_called_impossible(self) -> None:
        document = json.loads(REGULAR.to_json())
        document["replicas"][0]["stages"][0]["recompute"] = True
        found = export(Plan.parse(document, "plan"), "flagscale", cluster=make_cluster([{"a": 2}, {"a": 2}]))
        assert [item for item in found.lost if "recompute" in item] == [
            "recompute per stage, here: see its recompute_granularity_per_stage_micro_batch, which this file leaves out"
        ]

    def test_refusals(self) -> None:
        """What one type for each mesh, and the order of types, cannot say."""
        mixed = make_plan(([2, 2], [(0, 3, "n0/0"), (3, 6, "n1/0")]), ([2, 2], [(0, 3, "n1/1"), (3, 6, "n0/1")]))
        returning = make_plan(([1] * 4, [(0, 2, "n0/0"), (2, 4, "n1/0"), (4, 6, "n0/1")]))
        one_node = make_plan(([1] * 4, [(0, 3, "n0/0"), (3, 6, "n0/1")]))
        bare = make_plan(([1] * 4, [(0, 1, "n0/0"), (1, 6, "n1/0")]))
        two = make_cluster([{"a": 2}, {"b": 2}])
        for plan, cluster, message in (
            (mixed, two, "stage 0 is on a and b in different replicas"),
            (returning, two, "the stages are on a, b, a in turn"),
            (one_node, make_cluster([{"a": 1, "b": 1}]), "node n0 has devices of a and b, but a line of FlagScale's hostfile"),
            (bare, two, r"stage 0 has no transformer block .* hetero_pipeline_layer_split is \[0, 4\]"),
            (REGULAR, None, "give the cluster file"),
        ):
            with pytest.raises(InputError, match=message):
                export(plan, "flagscale", cluster=cluster)


class TestAutoModel:
    def test_few_micro_batches(self) -> None:
        plan = make_plan(([4], [(0, 3, "n0/0"), (3, 6, "n0/1")]))
        with pytest.raises(InputError, match="but a replica of this plan has 1 of 4 samples, and 2 stages"):
            export(plan, "automodel")

    def test_sharding_is_said(self) -> None:
        assert export(REGULAR, "automodel").lost == (
            "whole stages in each replica: FSDP2 shards each over its 2 devices, and gathers it for each use",
        )


class TestDiffusionPipe:
    def test_cuts(self) -> None:
        found = export(ONE_NODE, "diffusion-pipe")
        assert tomllib.loads(found.text)["partition_split"] == [1, 5]
        assert (
            "#   deepspeed --hostfile=hostfile --include=n0:2,0,1 train.py" not in found.text
        )  # DeepSpeed sorts a host's devices
        assert "--include=n0:0,1,2 train.py --deepspeed --config THIS_FILE" in found.text
        assert any(item.startswith("the place of n0/") for item in found.lost)

    def test_tensor_parallel(self) -> None:
        plan = make_plan(([2, 2], [(0, 3, "n0/0 n0/1"), (3, 6, "n1/0 n1/1")]))
        with pytest.raises(InputError, match="stage 0 of replica 0 is tensor-parallel over n0/0, n0/1, and diffusion"):
            export(plan, "diffusion-pipe")


class TestAccelerate:
    def test_the_map_covers_a_model_of_transformers(self) -> None:
        """Accelerate's own check: every tensor has a device, and every key is a module."""
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        modeling = pytest.importorskip("accelerate.utils.modeling")
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 8}
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=4, **sizes))
        found = device_map_of(export(ONE_NODE, "accelerate"))
        modeling.check_device_map(model, found)  # a key of no module is a warning, and so an error
        assert found["model.embed_tokens"] == found["model.rotary_emb"] == 2
        assert [found[f"model.layers.{i}"] for i in range(4)] == [0] * 4
        assert found["model.norm"] == found["lm_head"] == 1

    def test_one_card_at_a_time_is_said(self) -> None:
        lost = export(ONE_NODE, "accelerate").lost
        assert "a pipeline: the cards work one at a time, so 3 micro-batches pass one after another" in lost

    def test_replicas(self) -> None:
        with pytest.raises(InputError, match=r"but this plan has 2 replicas\. .* plan with --partitioner chain"):
            export(IRREGULAR, "accelerate")
