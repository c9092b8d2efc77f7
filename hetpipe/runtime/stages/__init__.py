"""Stages that have a process each (the back end `torch`). Read in this order:

order (of a stage's computations and transfers), transfers (what crosses a boundary), handed_on (a batch, to all devices of a
split stage), executor (one stage's actions of a step), trying (a stage on a few samples), engine (the stage in the plan).
"""
