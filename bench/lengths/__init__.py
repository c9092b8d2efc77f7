"""What does it save to pad batches to a few sizes, or to pack samples?"""
