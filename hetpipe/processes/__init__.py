"""The processes of a run: what they say, how they start, find each other and end. Read in this order:

environment (what a launcher says), whereabouts (what this rank is doing), progress (lines for people), stopping (signals),
peers/beats (signs of life), peers/hang_up (so that others find out), pulse (who is alive), peers/ (what is known of the other
ranks), rendezvous (the store that outlives a restart), cards (does torch drive them?), arithmetic (by which of torch's flags they
compute), world (ranks and their devices), standby (those that a plan does not use), ranks/ (starting those of one machine, and
what they say when they end).
"""
