"""`hetpipe finetune`. Read in this order:

table (what is said before training, and how to load what it left), command (its options).
"""
