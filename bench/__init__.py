"""Speed and memory, measured side by side; every number in LOG.md names its command."""
