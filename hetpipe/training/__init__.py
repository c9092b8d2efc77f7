"""From a job, or a model of one's own, to a run. Read in this order:

runlog (what a run comes to and writes), session (meet, prepare, join), observers/ (who looks on), metrics (what is known of a
run), director (by which plan a run goes on), loop (its steps), legs (from plan to plan), exported (its weights), trainer (a job
on one rank), table (its result), start (one command for one machine), own/ (`wrap` and `auto`).
"""
