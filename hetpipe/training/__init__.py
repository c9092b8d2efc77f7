"""From a job, or a model of one's own, to a run. Read in this order:

observers/records (what who looks on is told), runlog (what a run comes to and writes), session (meet, prepare, join), observers/
(who looks on), metrics (what is known of a run), moving/ (what goes from plan to plan), directing/ (by which plan a run goes on),
reference (of preferences), evaluation (of samples that do not train), undo (of a step that fails), loop (its steps), legs (from
plan to plan), results/ (what it gives), trainer (a job on one rank), start (one command for one machine), own/ (`wrap` and
`auto`).
"""
