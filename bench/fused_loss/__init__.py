"""What do the logits of a large vocabulary take, and the loss without them?"""
