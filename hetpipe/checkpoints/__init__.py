"""What a run leaves so that it can go on. Read in this order:

digests (is a file as it was written?), schedule (of the learning rate), training_state (step, order of the data, schedule),
state_tensors (weights and optimizer by name), shared (do all ranks see one folder?), tensor_files (tensors that all write and
read), checkpoint (all of it, for any plan), resume (a job's), own_checkpoint (of one's own loop), trained (its weights alone).
"""
