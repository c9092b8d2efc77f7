"""What the files say that go from room to room. Read in this order:

guesses (words of other trainers), number_types, cluster, profiles/ (parts of a profile), profile
(what was measured), clusters/ (of which nothing was measured), schedule (a stage's order of actions, as data), seats (who holds
which shard, and owns which gradients), plan, precisions (in which one each device type computes), options (of planning,
wherever they are given), sections/ (of a job), job.
"""
