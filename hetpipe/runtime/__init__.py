"""One step of a plan, exactly. Read in this order:

base (the Engine protocol), recorder (when each action ran), replicas (who owns which layers, and the process groups
for it), gradients (their sums), whole_state (all layers on one rank), holder (what a process holds), checks/ (what is looked
at), plan_engine (the step), stages/ (a process a stage), pipes/ (a process a replica), backends (which of them, by name).
"""
