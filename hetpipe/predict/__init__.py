"""What a plan costs, without running it; no torch. Read in this order:

cost (each formula once, with its source), timeline (who did what when), simulator (plan → timeline), footprint
(memory over time).
"""
