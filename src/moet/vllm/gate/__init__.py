"""The confidence gate: where the model is in doubt, a token is decided again at FP4."""
