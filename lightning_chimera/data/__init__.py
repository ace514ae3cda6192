"""Text, tokenizers and data modules for the recipes: nothing here is downloaded unless a hub data set is asked for."""
