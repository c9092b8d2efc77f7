"""One step of a plan, exactly. Read in this order:

base (the Engine protocol), recorder (when each action ran), replicas (who owns which layers, and the process groups
for it), gradients (their sums), given (is the batch right?), plan_engine (the step), stages/ (a process a stage), pipes/ (a
process a replica), finite (where the first NaN arose), backends (which of them, by name).
"""
