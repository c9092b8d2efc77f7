"""Layers that are split over several equal cards of a machine (tensor parallelism), by formula. Read in this order:

rules (of which models, and over how many cards), seconds (how long a card takes for its shard), measurements (a profile that has
them, and what of it a cluster can use), search (the plan of a row).
"""
