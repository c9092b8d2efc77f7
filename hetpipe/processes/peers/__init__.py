"""What a rank knows of the others. Read in this order:

beats (their signs of life, and which of them is to blame), hang_up (so that they find out), others (what they do, shown while one
waits for them), missing (which have not come), differences (which were told otherwise).
"""
