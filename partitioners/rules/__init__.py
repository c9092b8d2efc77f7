"""What the simple rules share, which lie one a file beside this room. Read in this order:

baseline (of some plans by hand, the fastest that fits), grids (pipelines × replicas over all devices), min_cut (of a
graph).
"""
