"""What the files say that go from room to room. Read in this order:

guesses (keys of other trainers), number_types, cluster, overhead (of the framework), profiles/ (parts of a profile), profile
(what was measured), clusters/ (of which nothing was measured), schedule (a stage's order of actions, as data), seats (who holds
which shard, and owns which gradients), plan, options (of planning, wherever they are given), sections/ (of a job), job.
"""
