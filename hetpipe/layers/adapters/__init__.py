"""Adapters: matrices of low rank that train beside a model that stays as it is. Read in this order:

quantised (linear layers that hold their matrices in 4 or 8 bits), targets (which layers get adapters), low_rank (the transform),
adapt (of a chain of one's own), ahead (imported before ranks are forked).
"""
