"""What each bit buys."""
