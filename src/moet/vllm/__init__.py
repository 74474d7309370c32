"""The plugin for stock vLLM: nothing of vLLM is patched, its registries are enough."""
