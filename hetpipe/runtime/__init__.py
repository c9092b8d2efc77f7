"""One step of a plan, exactly. Read in this order:

base (the Engine protocol), recorder (when each action ran), replicas (who owns which layers, and the process groups for it),
buffers (of replicas, kept alike), gradients (their sums), whole_state (all layers on one rank), checks/ (what is looked at),
precision/ (number types), holder (what a process holds, and which plans are refused), forward (batches, evaluation), plan_engine
(the step), checks/finite (where the first NaN arose), stages/ (a process a stage), pipes/ (a process a replica), backends (which
of them, by name).
"""
