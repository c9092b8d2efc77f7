"""What people hand in. Read in this order:

record (a record, and one that cannot be used), files (what they hold), contents (by which a file is known again), source (which
files).
"""
