"""What bytes: how a message is laid out, and the one entry point of a peer's message."""

VERSION = 3
"""Of all messages, and of the arithmetic on them: one more whenever a rank before a change and one after it
would not understand each other, or not come to the same bits."""
