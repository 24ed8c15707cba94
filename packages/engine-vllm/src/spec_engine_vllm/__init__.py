"""Engine ``vllm``: unmodified vLLM runs the target, in separate processes."""
