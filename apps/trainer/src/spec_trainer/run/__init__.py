"""This package has what a run is (spec, directory, metrics) and its hot path (schedule, dispatch, streams)."""
