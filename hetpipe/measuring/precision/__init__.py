"""What it takes to compute in a precision. Read in this order:

choice (at which precisions each device type is measured), casts (the copies of parameters that autocast keeps), layer_bytes (what
layers hold, save and send), counted (that, and what they compute, without values).
"""
