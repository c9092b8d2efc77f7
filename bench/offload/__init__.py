"""What does it take to keep activations, to compute them again, or to keep them in the host's memory: predicted and measured?"""
