"""Kinds of stage: the devices that a stage can be put on, and what its layers need there. Read in this order:

limit (when a search has to end), memoized (results that are kept), memory (what layers take), wires (seconds of links),
plan_class (its words), types (kinds by type only), space (by type and node).
"""
