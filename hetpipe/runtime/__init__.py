"""One step of a plan, exactly. Read in this order:

base (the Engine protocol), recorder (when each action ran), replicas (sums of gradients over the owners of a layer),
given (is the batch right?), plan_engine (the step), stages/ (a process a stage), pipes/ (a process a replica), finite
(where the first NaN arose), backends (which of them, by name).
"""
