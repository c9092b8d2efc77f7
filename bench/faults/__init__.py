"""What a run loses when it loses a host, and when it gets it back."""
