"""How well `hetpipe profile` measures links and adapters."""
