"""For backends: feature streams between processes, the memory that samples lie in, and a process group over
gloo."""
