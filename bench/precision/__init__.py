"""What a precision of each device type is worth, simulated from measured layers."""
