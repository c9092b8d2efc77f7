"""The command `hetpipe`: commands, one module for each group of others, exits (codes and last words)."""
