"""Losses and layers are tried on a few samples, whole and in parts, before they train. Read in this order:

chain_check (is the model a chain?), loss_trial (what a loss is tried on), masks (targets that may come later), loss_check (is it
a mean?), still (draws that come out alike), compare (parts beside the whole), rows (what layers are tried on), layer_check (does
a layer couple samples, or keep state?), apart (does a model of transformers see only what it should of a row of tokens?),
split_check (does a split layer compute what the whole one does?).
"""
