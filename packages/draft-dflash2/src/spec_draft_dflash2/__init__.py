"""This package is the draft plugin of DFlash2, which guesses tokens in blocks."""
