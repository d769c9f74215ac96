"""What bytes: how a message is laid out, and the one door through which a peer's message comes in."""
