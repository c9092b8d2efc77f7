"""What does a checkpoint take, in seconds and in memory, to write and to load?"""
