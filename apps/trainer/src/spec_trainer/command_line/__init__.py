"""What a command has around it: words, streams, log, signals, unforeseen errors."""
