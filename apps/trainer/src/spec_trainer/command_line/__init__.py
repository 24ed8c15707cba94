"""This package has code that all commands share: arguments, flags, output, log, signals, errors."""
