"""FASOP's published searches: its plans and ours, by both estimates."""
