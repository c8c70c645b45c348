"""Built-in tasks: queries and their verifiers; one module each."""
