"""Built-in teams; one module each."""
