"""Number types, and what follows from them for a step. Read in this order:

boundaries (what stages send each other), loss_scale (by what losses are divided, and gradients multiplied).
"""
