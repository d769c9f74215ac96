"""Of `gradsieve lab`: a file a command, each with `fill(parser)` and what it calls."""
