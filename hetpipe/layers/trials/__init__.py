"""Losses and layers are tried on a few samples, whole and in parts, before they train. Read in this order:

loss_trial (what a loss is tried on), loss_check (is it a mean?).
"""
