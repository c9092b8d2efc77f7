"""`hetpipe convert`: another trainer's configuration becomes a job. Read in this order:

job_file (what the commands share), fastspeed, trainers (LLaMA-Factory, axolotl), command (a new trainer gets a line there).
"""
