"""This package is the engine ``vllm``: unmodified vLLM runs the target in separate processes."""
