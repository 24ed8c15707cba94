"""This package trains on answers: those of the run's own engine in cycles, or live requests of servers."""
