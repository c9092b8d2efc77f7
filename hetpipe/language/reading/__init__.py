"""Records become samples here. Read in this order:

shape (what becomes of samples), texts (how a record becomes texts), gathered (the samples of some records, and what is to be
told of them), workers (other processes that read), read (all records, once on a host).
"""
