"""How much faster image transformers train on two unlike cards than by halves, and how right their predictions are. Read in this
order: material (a transformer and latents), run (the bench).
"""
