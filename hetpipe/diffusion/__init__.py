"""Diffusion transformers: their folders, their data and what is learned. Read in this order:

popular (transformers by name, and what a sample is), kinds (how a type of transformer is called), folder (one of diffusers,
and its schedule of noise), ahead (what ranks import before they are forked), cached (a folder of latents), noise (what a sample
is mixed with, and what is to be predicted of it), latents (what jobs name), random (random numbers in their place), model (a
chain of layers).
"""
