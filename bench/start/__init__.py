"""What a start of `hetpipe finetune` costs until its first step, by part."""
