"""What is run only to be looked at leaves all as it was. Read in this order:

randomness (generators), kept (what modules keep), kinds (which layers compute the same), fakes (tensors with no values, by which
shapes are found), boundaries (what crosses each boundary).
"""
