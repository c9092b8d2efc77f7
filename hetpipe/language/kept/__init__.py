"""What is made of data once on a host, in a file that all its ranks map and that the next start finds again. Read in this order:

key (what decides the samples), token_file (a file of arrays: whole, checked, deleted when others need the room), once (one
process makes it, the others wait).
"""
