"""How the activations of a region are handled, one file a way. Knows no policy and no model."""
