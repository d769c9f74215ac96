"""Of `gradsieve bench`: a file a measurement, each with `fill(parser)` and what it calls."""
