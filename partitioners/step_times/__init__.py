"""How long a step of a plan takes, found without building the plan. Read in this order:

drafts (rows of devices, most of which do the same), links, appraisal (a bound on a draft's step, and what it lacks in memory),
traffic (what adapters carry), steps (its step, to the bit), desk (of many drafts the best).
"""
