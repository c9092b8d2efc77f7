"""Clusters of which nothing was measured. Read in this order:

assumed (what the framework takes there), catalogue (nodes that could be rented).
"""
