"""This package is the engine ``llamacpp``, and writes drafts as GGUF files, which llama.cpp loads."""
