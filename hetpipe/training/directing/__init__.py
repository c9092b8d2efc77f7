"""By which plan a run goes on. Read in this order:

drift (whether devices are as fast as before), seen (a cluster with types for those that are not), director (what a director is
told and says), told (what is said of it), rebalance (whether another plan pays), memory (what a shortage tells of a device type),
by_job (the director of a job).
"""
