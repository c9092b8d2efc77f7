"""What every export takes of a plan. Read in this order:

shape (the nearest regular grid, its layers for each stage, and what differs), names (stages as a model's modules), places (which
process is which device), script (the text that is written: its header, a line for each node).
"""
