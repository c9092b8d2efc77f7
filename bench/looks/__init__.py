"""What looks at replayed models cost, and building them, by their layers."""
