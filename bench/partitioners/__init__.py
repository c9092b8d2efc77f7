"""Every baseline against `auto`, simulated, on mixed clusters."""
