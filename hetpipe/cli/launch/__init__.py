"""`hetpipe launch`. Read in this order:

options (which system has which, where paths begin), command.
"""
