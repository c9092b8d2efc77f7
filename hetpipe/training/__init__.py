"""From a job, or a model of one's own, to a run. Read in this order:

runlog (what a run writes), session (meet, prepare, join), metrics (what is known of a run), watch (shown while it goes on),
loop (its steps), trainer (a job on one rank), table (its result), start (one command for one machine), own_loop (`wrap`),
autowrap (`auto`).
"""
