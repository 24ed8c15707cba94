"""This package has what every other part of the application uses: disk, hub, progress, stop requests, words."""
