"""moet: frontier Mixture-of-Experts models on small GPUs, inside unmodified vLLM."""

__version__ = "0.1.0"
