"""Planning algorithms, one a file, behind the `Partitioner` protocol of `hetpipe/planning/partition.py`. Their words:

| word | meaning | file |
|---|---|---|
| problem | what is planned: a cluster, a profile, a global batch, and options | `hetpipe/planning/partition.py` |
| plan class | all plans that `auto` and `exhaustive` choose from | `stage_kinds/plan_class.py` |
| kind of stage | a device of a type, or several that split a stage; and whether the stage offloads | `stage_kinds/types.py` |
| kind of a node | a kind of stage on one node only: the exact search tells nodes apart | `stage_kinds/space.py` |
| degree | how many devices split the tensors of a stage | `stage_kinds/types.py` |
| load | the samples of a replica, in micro-batches of one size and a remainder | `stage_kinds/plan_class.py` |
| family | a rule for the warm-up depths of all stages of a pipeline | `stage_kinds/plan_class.py` |
| limit, meter | when a search has to end; what counts how much it did | `stage_kinds/limit.py` |
| rule | a partitioner that tries some plans, and takes the fastest that fits | `step_times/desk.py` |
| draft, work | a plan that is not built yet; what one of its pipelines does | `step_times/drafts.py` |
| kind of pipeline | pipelines of a draft with the same work on the same types and links | `step_times/appraisal.py` |
| desk | where drafts are bounded, and those that could be the fastest simulated | `step_times/desk.py` |
| budget | how many tasks may still be simulated | `step_times/desk.py` |
| packing | pipelines side by side that memory holds, whatever the time they take | `memory_fit/packing.py` |
| shortage | the bytes that are missing on devices of a type | `memory_fit/shortage.py` |
| obstacle | why nothing fits, and small changes with which a plan does | `memory_fit/obstacle.py` |
| grid, layout | pipelines × replicas over all devices | `rules/grids.py` |
| bound | a step that no plan is below | `bound/lower.py` |
| relaxed pipeline | a pipeline that keeps fewer rules than a real one, so that none is cheaper | `bound/relaxed.py` |
| label | relaxed stages that hold all layers from one on: a price, and the time left for the layers before | `bound/labels.py` |
| take | the number of stages of each kind in a pipeline | `pipelines/real.py` |
| line | the kind of each stage, from the first to the last | `pipelines/line_cuts.py` |
| cut, common cut | the layer that a stage ends before; one that all replicas have | `pipelines/line_cuts.py` |
| wish | a pipeline that is to be built: a take or a line, about so many samples, a micro-batch | `search/assembly.py` |
| mix | the pipelines of a plan, and how many of each | `search/assembly.py` |
| share | the samples of a step that a replica gets | `exact/side_by_side.py` |
| way | how the stages of a mix are placed on nodes | `search/places.py` |
| floor | the best plans of the simple rules: `auto` is never slower | `search/floor.py` |
| composition | a pipeline, only by its stages of each kind of a node | `compositions/composition_bounds.py` |
| grouping | compositions side by side | `compositions/groupings.py` |
| pool | pipelines to choose from | `exact/pools.py` |
| plan in hand | the best so far, which the exact search starts from | `exact/best_first.py` |
| `ready()` | compiles the functions of its file, or reads them from disk, outside of a limit | `pipelines/line_cuts.py`, … |

Folders are rooms that the planners share; imports go down this list:

auto, chain, exhaustive
search, exact
even_pipelines
compositions
pipelines
cephalo, equal_parameters, even, even_data_parallel, fasop, memory_layers, torchgpipe_balance, type_blind, uneven_data_parallel,
    zorse
rules
memory_fit
bound
step_times
stage_kinds
"""
