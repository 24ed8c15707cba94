"""A backend that computes on the CPU and says what it was asked for."""
