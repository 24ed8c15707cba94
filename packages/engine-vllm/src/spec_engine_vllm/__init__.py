"""Engine ``vllm``: the target run by stock vLLM, in processes of its own."""
