"""Does splitting layers over two devices pay where the planner says so, and is it predicted?"""
