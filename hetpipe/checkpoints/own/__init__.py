"""Checkpoints of a loop of one's own. Read in this order:

facts (what the loop depends on), checkpoint (saved and loaded).
"""
