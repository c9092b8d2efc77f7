"""What a run leaves so that it can go on. Read in this order:

digests (is a file as it was written?), stores/ (where checkpoints are kept), schedule (of the learning rate), best
(evaluation), training_state (step, order of the data, schedule), state_tensors (weights and optimizer by name), beside/copies (of
these in host memory), checkpoint (all of it, for any plan, in any store), beside/ (writing it beside steps), kept (by ranks that
are left when one is lost), origin/ (of which model it is), resume (what of a job's run is saved, and how it goes on), own/ (of a
loop of one's own), trained (its weights alone).
"""
