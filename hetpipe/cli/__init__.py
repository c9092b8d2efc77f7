"""The command `hetpipe`. Read in this order:

terminal (colours, bars), exits (codes, last words), the larger commands (front, exchange, weights, fastspeed),
commands (all others).
"""
