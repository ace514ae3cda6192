"""Config groups, one decision each, for `lightning-chimera-train` and for Hydra projects that build on them."""
