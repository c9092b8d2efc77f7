"""What the files say. Read in this order:

cluster, catalogue (nodes that could be rented), profile (what was measured), schedule (a stage's order of actions),
plan, job.
"""
