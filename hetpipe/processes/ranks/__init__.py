"""The ranks of one machine. Read in this order:

forkserver (the process from which they are forked), preload (what it imports for a job), report (what each says when it ends),
launch (starting them, and telling what went wrong first).
"""
