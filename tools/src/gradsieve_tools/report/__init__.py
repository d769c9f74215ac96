"""`gradsieve report`: one HTML page of what was recorded."""
