"""Clusters of which nothing was measured: what is assumed of them, and nodes that could be rented."""
