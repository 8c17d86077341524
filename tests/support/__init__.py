"""What tests over real worker processes share: the application under test and the harness that runs it."""
