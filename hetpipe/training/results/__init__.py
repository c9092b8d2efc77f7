"""What a run that has ended gives. Read in this order:

exported (its weights, for others), table (its numbers, on a terminal).
"""
