"""What each scheme selects and what it costs."""
