"""This package is the draft plugin of DSpark, which guesses tokens in blocks."""
