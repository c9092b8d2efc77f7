"""What people hand in. Read in this order:

record (a record, and one that cannot be used), files (what they hold), source (which files).
"""
