"""What a plan takes, without building it. Read in this order:

drafts (rows of devices, most of which do the same), links, sets, pipeline_ends (the simulator's pipelines, compiled),
earliest (bounds for many pipelines at once), appraisal (a bound on a draft's step, and what it lacks in memory),
traffic (what adapters carry), steps (its step, to the bit), desk (of many drafts the best).
"""
