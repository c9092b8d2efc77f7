"""Runs whose devices become slower: are they seen, and what does it gain to move layers?"""
