"""The commands that the lab adds to `gradsieve`, by the entry points in its `pyproject.toml`."""

from gradsieve.tools.cli import Command


def _lab(name: str) -> str:
    return f"{__name__}.lab.{name}"


def _bench(name: str) -> str:
    return f"{__name__}.bench.{name}"


LAB = Command(
    "a real multi-host network on one Linux machine",
    inner={
        "run": Command("run a command on every host", _lab("run")),
        "draw": Command("a picture of a network file", _lab("draw")),
        "kill-matrix": Command(
            "let ranks die and stall at every op of a step, and check the survivors", _lab("kill_matrix")
        ),
        "fuzz": Command("altered messages at every place where a peer's bytes are read", _lab("fuzz")),
        "chaos": Command(
            "train through a seeded schedule of faults of every kind, and check all ranks", _lab("chaos")
        ),
        "spot": Command(
            "train under torchrun on nodes that are killed, given notice and replaced", _lab("spot")
        ),
        "soak": Command(
            "train for thousands of steps and see whether memory, files or threads grow", _lab("soak")
        ),
    },
)
BENCH = Command(
    "measure schemes against dense and against the limit",
    inner={
        "step": Command("seconds a training step takes, on a lab network", _bench("step")),
        "step-plot": Command(
            "step time against link rate, from the results of bench step", _bench("step_plot")
        ),
        "overhead": Command(
            "arithmetic of a step over a bare add_ and zero_, on virtual ranks", _bench("overhead")
        ),
        "exchange": Command(
            "collectives through the engine against bare gloo, on a lab network", _bench("exchange")
        ),
        "hsdp": Command("sharded inside hosts, sparse between them, on a lab network", _bench("hsdp")),
        "plan": Command("predictions of `gradsieve plan` against a lab network", _bench("plan")),
        "collectives": Command(
            "collectives by messages of our own against gloo's, on a lab network", _bench("collectives")
        ),
        "time-to-accuracy": Command(
            "seconds to the accuracy or loss that dense ends with, on a lab network",
            _bench("time_to_accuracy"),
        ),
        "race": Command(
            "seconds until a GPT is as good as dense makes it, for any command that trains one",
            _bench("race"),
        ),
        "traffic": Command("words moved as the number of ranks grows, on virtual ranks", _bench("traffic")),
        "schemes": Command(
            "words and quality of every scheme on recorded gradients, on virtual ranks", _bench("schemes")
        ),
        "bits": Command(
            "what an exchange sends for its bits, next to the limit, on virtual ranks", _bench("bits")
        ),
        "memory": Command("memory that a sync adds to a rank, on real ranks", _bench("memory")),
        "lost": Command("gradient that a scheme loses, to the last bit, on virtual ranks", _bench("lost")),
        "accuracy": Command("final accuracy of whole trainings, on virtual ranks", _bench("accuracy")),
        "resize": Command("trainings that change their number of ranks, on virtual ranks", _bench("resize")),
        "elastic": Command(
            "a training inside torchft whose replicas are killed and stopped", _bench("elastic")
        ),
    },
)
SIMULATE = Command(
    "a step at up to thousands of ranks on a simulated network: star, fat tree, torus, two clouds",
    "gradsieve_lab.commands.simulate",
)
FIGURE = Command("draw the papers' figures", "gradsieve_lab.commands.figure")
