"""All plans of few devices that could be better than the one in hand. Read in this order:

batch (the simulator for many candidates at once), pricing (complete pipelines simulated), candidates (all pipelines of
a composition), pools (those of all compositions), shares (of the batch, for each
replica), joint (replicas side by side), plans (from rows to a Plan), best_first (the search: groupings, least bound first).
"""
