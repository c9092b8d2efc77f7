"""All plans of few devices that could be better than the one in hand. Read in this order:

listing (all pipelines of a composition below a threshold), pricing (simulated), pools (those of all compositions), side_by_side
(one for each replica), plans (from rows to a Plan), best_first (the search: groupings, least bound first).
"""
