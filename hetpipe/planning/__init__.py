"""Which plan: from a problem to a plan with its prediction and bounds; no torch. Read in this order:

partition (Problem, Solution, the contract of every partitioner), shares, programs (linear ones), bounds, registry (where names
are found), offload (beside recompute), planner (`make_plan`), workers (several problems at once), front (its format), pareto
(`make_front`).
"""
