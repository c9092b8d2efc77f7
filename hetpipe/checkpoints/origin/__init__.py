"""A checkpoint's model, where the checkpoint does not hold all of it. Read in this order:

base (which adapters were added to, and where they began), base_numbers (is it still the same?), configured (is its model?),
revision (of weights that are named on Hugging Face).
"""
