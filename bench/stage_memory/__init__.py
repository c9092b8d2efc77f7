"""How much memory a rank takes for its stage of a model that no rank holds whole."""
