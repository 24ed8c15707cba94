"""This package is the draft plugin of DFlash, which guesses tokens in blocks."""
