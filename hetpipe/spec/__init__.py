"""What the files say that go from room to room. Read in this order:

guesses (keys of other trainers), cluster, catalogue (nodes that could be rented), profile (what was measured), assumed
(what was not), schedule (a stage's order of actions, as data), plan, options (of planning, wherever they are given), job.
"""
