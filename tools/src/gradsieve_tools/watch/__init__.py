"""`gradsieve watch`: a running job, live, from its records."""
