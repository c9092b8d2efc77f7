"""What a plan costs, without running it; no torch. Read in this order:

cost (each formula once, with its source; which gradients are summed by whom), timeline (who did what when), simulator
(plan → timeline; when sums begin), footprint (memory over time), idle (why a device waits).
"""
