"""A loop of one's own. Read in this order:

loop (a model by a plan), auto (measured and planned first).
"""
