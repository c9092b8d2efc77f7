"""What goes from plan to plan in one run. Read in this order:

moves (which layers change their place, and how long that takes), modules (a model whose layers come and go), carried (tensors, by
name, from the ranks that have them to those that want them).
"""
