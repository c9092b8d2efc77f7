"""The best pipelines that can be built of so many devices of each kind. Read in this order:

stage_orders (with which the longest stage is shortest), line_cuts (the cuts of a given order), real (both, with
micro-batch and warm-up).
"""
