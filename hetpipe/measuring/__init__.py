"""What the devices and links are and how fast, measured on themselves. Read in this order:

discover (which devices are there), profiler (one model on one device), measure (all types, all links), confirm (does
a profile still hold?), cache.
"""
