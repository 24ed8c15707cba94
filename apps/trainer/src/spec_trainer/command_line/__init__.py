"""Parts that all commands share: words, flags, output, log, signals, unforeseen errors."""
