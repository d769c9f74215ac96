"""Published schemes with the rules as their papers state them."""
