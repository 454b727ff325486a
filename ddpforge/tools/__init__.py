"""Tools around training, one folder each."""
