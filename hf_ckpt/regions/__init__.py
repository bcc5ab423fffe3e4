"""What happens to the activations of a region: recomputed, kept, offloaded, tiled. Knows no policy and no model."""
