"""Code that all commands share: arguments, flags, output, log, signals, unexpected errors."""
