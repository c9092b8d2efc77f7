"""Stages that have a process each (the back end `torch`). Read in this order:

transfers (what crosses a boundary), executor (one stage's actions of a step), engine (the stage in the plan).
"""
