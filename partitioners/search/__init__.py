"""The search for plans of any number of devices, which are told apart by their type only. Read in this order:

effort (how much is tried), places (on which nodes stages are put), estimate (about what a plan takes), assembly (plans of
pipelines for a number of replicas), improve (local search by estimates), polish (and by what neighbours really take), planner
(bound, plans, local search), floor (the best plan of each simple rule), cheapest (subsets of the devices, under a deadline).
"""
