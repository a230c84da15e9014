"""What speculative sampling costs and gains, before it is run."""
