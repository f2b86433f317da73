"""The ``fedtar`` command line: thin, each command calls one function of the library."""
