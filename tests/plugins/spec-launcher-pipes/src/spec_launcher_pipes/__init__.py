"""A launcher whose messages are lines of JSON on the standard input and output of workers."""
