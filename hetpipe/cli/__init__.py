"""The command `hetpipe`. Read in this order:

terminal (colours, bars), exits (codes, last words), guesses (what others call it), the larger commands (front, exchange,
weights, fastspeed), commands (all others).
"""
