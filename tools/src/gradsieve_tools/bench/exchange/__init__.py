"""One exchange, by what it is made of."""
