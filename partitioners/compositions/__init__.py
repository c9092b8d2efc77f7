"""Bounds for pipelines that are known by their numbers of devices only (compositions). Read in this order:

symmetry (nodes that can be exchanged), stage_times (of one stage), composition_bounds (one for each), groupings (which stand side
by side).
"""
