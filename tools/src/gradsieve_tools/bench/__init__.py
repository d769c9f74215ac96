"""The measurements behind `gradsieve bench`."""
