"""Third parties' packages: not part of this environment. tests/packaging installs them into one of their own."""

collect_ignore_glob = ["*"]
