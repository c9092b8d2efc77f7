"""What a run leaves so that it can go on. Read in this order:

training_state (step, order of the data), checkpoint (weights and optimizer, for any plan), resume (a job's),
own_checkpoint (of one's own loop).
"""
