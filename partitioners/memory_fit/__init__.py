"""Whether any plan fits into memory, and what would make one fit. Read in this order:

capacity (how many samples the memory of a cluster holds), shortage (what is missing where no plan of a rule fits),
obstacle (the smallest changes with which a plan fits).
"""
