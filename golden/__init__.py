"""The equivalence harness: what a score must equal, written without the code that serves it."""
