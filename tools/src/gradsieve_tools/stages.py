"""The stages of a step: their order, and one colour each in every picture."""

STAGE_COLOURS = {
    "forward": "#c6dbef",
    "backward": "#6baed6",
    "waiting": "#d62728",
    "apply": "#9467bd",
    "commit": "#c5b0d5",
    "check": "#8c6d31",
    "optimizer": "#74c476",
    "accumulate": "#17becf",
    "select": "#bcbd22",
    "partition": "#7b9e3b",
    "threshold": "#1f4e79",
    "encode": "#e377c2",
    "exchange": "#ff9f40",
    "decode": "#8c564b",
}
OTHER = "#7f7f7f"
# from the bottom of a bar to its top; `waiting` is another thread's, at the same time
EXCHANGE_STAGES = [
    "accumulate",
    "select",
    "partition",
    "encode",
    "exchange",
    "decode",
    "apply",
    "threshold",
    "commit",
]
WAITING = "waiting"
