"""For drafts: an exported draft's folder, rotary embeddings, decoder layers, plain kernels and the target's
head."""
