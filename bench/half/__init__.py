"""Does training with a precision for each device converge as in fp32, and is a step of it predicted as it is?"""
