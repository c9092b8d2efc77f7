"""Replicas that one process drives, by fairscale's Pipe or torchgpipe's GPipe. Read in this order:

pipe_stage (a stage as these libraries want it), batch_norm (deferred statistics), one_process (the engine),
fairscale_pipe and torchgpipe_gpipe (its adapters).
"""
