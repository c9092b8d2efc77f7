"""From a job, or a model of one's own, to a run. Read in this order:

runlog (what a run writes), session (the ranks meet), trainer (the loop), table (its result), start (one command for one machine),
own_loop (`wrap`), autowrap (`auto`).
"""
