"""What a plan costs, without running it; no torch. Read in this order:

cost (each formula once, with its source), sums (which gradients are summed by whom, and when), timeline (who did what when),
compiled (functions that numba compiles), pipeline (one by itself), flows (what shares bandwidth), contention (pipelines and
sums as flows), simulator (plan → timeline), footprint (memory over time), idle (why a device waits).
"""
