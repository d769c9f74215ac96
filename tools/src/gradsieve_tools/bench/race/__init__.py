"""Seconds until a GPT is as good as dense makes it, over slow links."""
