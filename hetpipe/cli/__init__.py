"""The command `hetpipe`: commands, a module for each group of others, exits (codes, last words), terminal (colours, bars)."""
