"""What a pipeline gains where nothing in its first layers trains."""
