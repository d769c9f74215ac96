"""The `gradsieve` command: parse, call one function, print."""
