"""`hetpipe finetune`: from a model, a file of texts or a folder of latents, and cards to a job and its trained
weights. Read in this order:

asked (what the command was told), emulated (cards that are played), kinds (what the data are), draft (the job, as far as that and
what is known of model and data say it), looked (what is wrong, told at once), facts (of the model and the data), job (the whole
job), folder (what a run writes, and what of another is there), statement (what will be done, and what else could be), program (on
each rank: plan, say, train, export).
"""
