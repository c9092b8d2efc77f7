"""The processes of a run: what they say, how they start, find each other and end. Read in this order:

progress (lines for people), whereabouts (what this rank is doing), stopping (signals), pulse (who is alive),
rendezvous (the store that outlives a restart), cards (does torch drive them?), world (ranks and their devices),
forkserver, launch (starting the ranks of one machine).
"""
