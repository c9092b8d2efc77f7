"""Whether any plan fits into memory, and what would make one fit. Read in this order:

packing (pipelines side by side that fit devices), hosts (which have too little memory for what these offload), shortage (what is
missing where no plan of a rule fits), obstacle (what is in the way where nothing fits, and changes with which a plan does).
"""
