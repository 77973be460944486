"""Training steps: what a training script sends, and the collector that receives it."""
