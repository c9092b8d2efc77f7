"""What a plan can be, and what its stages need. Read in this order:

limit (when a search has to end), kept (results that are kept), memory (how layers fit), wires (seconds of links and
sums), space (the plan class; every device by itself), types (the same, with devices counted).
"""
