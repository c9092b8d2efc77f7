"""What is run only to be looked at leaves all as it was. Read in this order:

randomness (generators), kept (what modules keep), fakes (tensors with no values, by which shapes are found).
"""
