"""What a HuggingFace model is made of, how it is cut into stages, and how a stage is run."""
