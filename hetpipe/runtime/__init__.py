"""One step of a plan, exactly. Read in this order:

base (the Engine protocol), boundaries (what stages send each other, by their number types), recorder (when each action ran),
replicas (who owns which layers, and the process groups for it), buffers (of replicas, kept alike), gradients (their sums),
whole_state (all layers on one rank), checks/ (what is looked at), holder (what a process holds, and which plans are refused),
plan_engine (the step), checks/finite (where the first NaN arose), stages/ (a process a stage), pipes/ (a process a replica),
backends (which of them, by name).
"""
