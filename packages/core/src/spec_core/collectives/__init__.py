"""For backends: process groups over a library of collectives, and one over gloo."""
