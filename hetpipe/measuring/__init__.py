"""What the devices and links are and how fast, measured on themselves. Read in this order:

layer_run (one layer, run), clock (by what it is timed), precision/ (which are measured; bytes of layers in each), profiler (one
model on one device), discover (which devices are there), traffic (timed messages), links (what nodes send each other, each way),
overhead (what the framework takes), measure (all types, all links), confirm (does a profile still hold?), cache.
"""
