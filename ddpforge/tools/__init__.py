"""Programs around training, one folder a tool."""
