"""A layer split over several devices (tensor parallelism). Read in this order:

layout (which tensors are cut, and how), few_bits (matrices in few bits, cut), styles (how a layer's modules are split, and the
layout that follows), sums (what the devices of a group send each other in forward and backward), linears (split linear layers),
dora (DoRA's lengths beside them), split (a layer, made one of the shards of itself), standing_in (the messages of a device that
computes no more).
"""
