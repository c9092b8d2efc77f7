"""Samples that come one after the other, with no known end. Read in this order:

records (the records of a stream, found again by a bookmark), sampler (which of them make up which step), streamed (the samples,
by their numbers).
"""
