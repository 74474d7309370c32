"""The plugin for stock vLLM: nothing of vLLM is patched, its registries are enough."""

METHOD = "moet"  # what --quantization calls it
