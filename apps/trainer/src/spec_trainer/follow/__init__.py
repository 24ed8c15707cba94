"""Follow live traffic: train on requests of running servers, and push drafts that improve."""
