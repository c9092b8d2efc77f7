"""Seconds per step of hetpipe's engine beside loops written by hand."""
