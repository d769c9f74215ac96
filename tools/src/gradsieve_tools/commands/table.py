"""All commands but their calls: what each is for, what it takes, and how it is called.

A call is loaded when the command line asks for its command:
most of them reach torch, which takes a second or two, and help should not.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gradsieve_tools.bench.race import rules
from gradsieve_tools.cli import quantity, schemes, size
from gradsieve_tools.cli.tree import Command, Option, flag, option, output, picture
from gradsieve_tools.commands.values import (
    codecs,
    lossy,
    models,
    numbers,
    schemes_and_rivals,
    sizes,
    some,
    talking,
    tasks,
    ways,
    words,
    world,
    worlds,
)
from gradsieve_tools.devices import DEVICES
from gradsieve_tools.quantities import BITS, BYTES_A_SECOND, ELEMENTS_A_SECOND, SECONDS

LINKS = (
    option("--rate", "of each link, e.g. 1gbit (default: unshaped)", "R"),
    option("--delay", "one way, e.g. 5ms (default: none)", "D"),
)
LAB = (option("--hosts", "numbers of hosts in the lab, a table each", "LIST", sizes, "4"), *LINKS)
MODELS = option("--models", "what is trained", "LIST", models, "cnn,transformer,recommender")
JSON = output("--json", "write the rows and how they came about there")
RECORD = option(
    "--record", "write what every rank did in every step there, for `gradsieve figure`", "FOLDER", Path
)


def density(default: float) -> Option:
    return option("--density", "share that is sent", "D", float, default)


def densities_of(default: str) -> Option:
    return option("--densities", "shares that are sent", "LIST", numbers, default)


def syncs(default: str) -> Option:
    """Return what a bench on a lab network compares."""
    known = "schemes, auto, fp16 and powersgd; settings of a scheme follow a colon, with + between them; "
    known += "exchange settings follow an @: spardl:teams=2, exdyna@paper, exdyna@steps:every=2"
    return option("--syncs", known, "LIST", default=default)


# fmt: off
_BENCH = {
    "step": Command(
        "seconds a training step takes, on a lab network",
        """\
How long a training step takes with each way of exchanging gradients.

Trains a real model on a lab network (see `gradsieve lab run --help`), all ways round robin in one run, next
to dense and to no exchange at all, the limit. Needs root.

Hosts in a lab share this machine's cores: compare syncs in one table, not tables with each other.

columns:
  late         steps after which a gradient knows what other ranks moved; 0 is in the same step
  step_ms      of a whole training step, the median of the rounds
  vs_noop      over that of the limit in the same round; 1 is best
  vs_dense     dense's over it in the same round: how many times as fast
  ..._half     between which ratios the middle half of the rounds lies; the JSON has those of all rounds
  bytes_sent   by the busiest rank in a step, as its network interface counts them
  bits         the same for one parameter
  of_link      the same over what the link carries during a step of noop; of shaped links
  density      elements in the update over all; of what does not go dense by itself
  hidden       share of the time in collectives that passed while forward or backward computed; of steps
  recorder_ms  processor time of the recorder in a step, the busiest rank's; with --record""",
        """\
gradsieve bench step --rate 1gbit --syncs exdyna,topk --json step.json
gradsieve bench step --hosts 2,4,8 --rate 1gbit --syncs exdyna,exdyna@steps:every=2,exdyna@paper
gradsieve bench step --rate 100mbit --syncs exdyna --trace trace.json --timeline timeline.png""",
        "gradsieve_tools.commands.bench:step",
        *LAB,
        option("--workload", "what is trained; elsewhere waits in each layer instead of computing; idle "
            "waits in forward and backward, as for an accelerator",
            choices="gradsieve_tools.bench.step.measure:WORKLOADS", default="mlp"),
        option("--compute", "what a step of idle takes", "T", quantity(SECONDS, "300ms"), "300ms"),
        flag("--ahead", "the host of idle queues steps ahead of its device"),
        flag("--spin", "our thread of idle spins while it waits"),
        option("--params", "model size", "N", size, "25e6"),
        density(0.001),
        syncs("noop,dense,fp16,powersgd,topk,exdyna"),
        option("--rounds", "turns for each sync", "N", size, "5"),
        output("--json", "write the result there"),
        option("--record", "run each of our syncs a second time, with a recorder that writes there: what it "
            "costs, and files for `gradsieve figure`", "FOLDER", Path),
        output("--trace", "write the last step of each of our syncs there, for chrome://tracing or Perfetto"),
        picture("--timeline", "draw these steps there"),
    ),
    "step-plot": Command(
        "step time against link rate, from the results of bench step",
        """\
Step time against link rate, from the files of several runs of `bench step --json`.

The runs are of one workload, with the same hosts, parameters, density and delay, at different rates.""",
        """\
gradsieve bench step-plot step-100mbit.json step-1gbit.json step.json --plot step.png""",
        "gradsieve_tools.commands.bench:step_plot",
        option("files", "results of `bench step`", "FILE.json", Path, nargs="+"),
        picture("--plot", "draw there", required=True),
    ),
    "overhead": Command(
        "arithmetic of a step over a bare add_ and zero_, on virtual ranks",
        """\
The arithmetic of a step alone, on virtual ranks, in one thread; no network and no training.

columns:
  exchange   what is exchanged: steps (the default of the library) or gradients
  kernel     compiled (needs numba) or pure torch
  ours_ms    all that a rank computes in a step, the mean over ranks: accumulate, select, encode, decode,
             apply, commit, check
  bare_ms    a.add_(b) and b.zero_() over as many elements
  ratio      of the two, the median over rounds; 1 is the floor. Both are processor time
  density    elements in the update over all
The second table has the milliseconds by stage, by the clock on the wall.""",
        """\
gradsieve bench overhead --params 25e6 --world 4 --density 0.001 --json overhead.json""",
        "gradsieve_tools.commands.bench:overhead",
        option("--schemes", "whose arithmetic", "LIST", schemes, "exdyna"),
        option("--world", "virtual ranks", "N", size, "4"),
        option("--params", "length of the gradient", "N", size, "25e6"),
        density(0.001),
        JSON,
    ),
    "exchange": Command(
        "collectives through the engine against bare gloo, on a lab network",
        """\
What our engine adds to the collectives of a step: the same ones bare, round robin, on a lab network.

A few real steps show which collectives the scheme asks for, and of what size. Needs root.

rows:
  bare gloo   these collectives by torch.distributed, called from the main thread
  engine      the same, asked for by a program on our engine
  in a step   the collectives of whole steps: a rank waits there also for ranks that select more slowly
columns:
  ms          the median over turns
  ratio       to bare gloo of the same round, the median; of the steps, to the median of bare gloo
  bytes_sent  by the busiest rank, as its network interface counts them""",
        """\
gradsieve bench exchange --hosts 4 --rate 1gbit --params 25e6 --json exchange.json""",
        "gradsieve_tools.commands.bench:exchange",
        *LAB,
        option("--scheme", "settings follow a colon, the exchange's an @: exdyna:values=bf16@gradients",
            "NAME", default="exdyna"),
        option("--params", "size of the MLP", "N", size, "25e6"),
        density(0.001),
        option("--rounds", "turns", "N", size, "15"),
        output("--json", "write the result there"),
    ),
    "hsdp": Command(
        "sharded inside hosts, sparse between them, on a lab network",
        """\
A training step of an MLP that FSDP2 shards inside hosts: ways to exchange between the hosts, round robin,
in one run on a lab network. All ranks of a host share its link; among themselves they talk as fast as the
machine goes. Parameters stay gathered from forward to backward. After the measuring, hosts' bits are compared
until --steps are full. Needs root.

rows:
  noop        nothing between the hosts: the limit
  dense       FSDP2's own HSDP, which averages all gradients
  auto        gradsieve.attach(model, optimizer, replicate=...), as it is without settings
columns:
  vs_noop     step over noop's, the median of the rounds; _half: the middle half of the rounds
  vs_dense    dense's step over this one's
  bytes_sent  by the busiest host, as its network interface counts them""",
        """\
gradsieve bench hsdp --hosts 2 --per-host 2 --rate 1gbit --params 25e6 --json hsdp.json""",
        "gradsieve_tools.commands.bench:hsdp",
        option("--hosts", "hosts in the lab", "N", size, "2"),
        option("--per-host", "ranks, and shards, a host", "N", size, "2"),
        *LINKS,
        option("--params", "size of the MLP", "N", size, "25e6"),
        option("--batch", "rows a rank, 32 at most", "N", size, "8"),
        option("--rounds", "turns of each", "N", size, "9"),
        option("--steps", "of auto, in all", "N", size, "200"),
        output("--json", "write the result there"),
    ),
    "plan": Command(
        "predictions of `gradsieve plan` against a lab network",
        """\
How far the predictions of `gradsieve plan` are from what a lab measures.

For each case of hosts, rate and delay: a profile by `gradsieve doctor`, every sync's exchange alone, and a
whole training step with it. A case takes some minutes, and is a file in the folder: a run that was broken off
goes on with those that are not there. Needs root.

With --against it runs nothing: steps of DDP and LocalSGD that others measured on GPUs are predicted as
`gradsieve plan --device` does.

columns:
  exchange_ms     one exchange alone, its own computing included; predicted_exchange_ms, and how far off
  step_ms         a whole training step; predicted_ms, and how far off""",
        """\
gradsieve bench plan --cases 4:1gbit:0ms,4:100mbit:5ms --folder runs --json plan-lab.json
gradsieve bench plan --folder runs --json plan-lab.json      # 36 cases
gradsieve bench plan --against benchmarks/results/gpu-cluster-2026-08-16.json""",
        "gradsieve_tools.commands.bench:plan",
        option("--cases", "hosts:rate:delay, or a network's TOML file, with commas between (default: 2 to "
            "16 hosts, 20mbit to 1gbit, 0 to 20ms)", "LIST", default="grid"),
        option("--params", "of an MLP", "N", size, "2e6"),
        density(0.01),
        option("--syncs", "default: dense, fp16, powersgd, auto and the flat schemes", "LIST"),
        option("--rounds", "turns for each sync", "N", size, "3"),
        option("--folder", "where each case's result is kept", "FOLDER", Path),
        option("--against", "steps that others measured on GPUs, instead of a lab", "FILE", Path),
        output("--json", "write all of them there, with the errors"),
    ),
    "collectives": Command(
        "collectives by messages of our own against gloo's, on a lab network",
        """\
Collectives by messages of our own next to gloo's, round robin, in one run on a lab network.

Needs root.

columns:
  bytes      that a rank hands in; of an all-to-all, for all ranks together
  bare_ms    torch.distributed on gloo, called from the main thread; the median over turns
  engine_ms  the op as our engine carries it by itself: gloo's, and an all-to-all message by message
  rounds_ms  the same op in log2 P rounds of messages, halving and doubling
  direct_ms  the same op by messages from every rank to every other, some at once
  chosen     which of the last three a training takes on these links
  faster     bare_ms over the one chosen, of the same turn; the median""",
        """\
gradsieve bench collectives --hosts 16 --delay 5ms --json collectives.json""",
        "gradsieve_tools.commands.bench:collectives",
        *LAB,
        option("--bytes", "what a rank hands in", "LIST", sizes, "1e3,100e3,1e6"),
        option("--rounds", "turns of ten each", "N", size, "5"),
        output("--json", "write the result there"),
    ),
    "time-to-accuracy": Command(
        "seconds to the accuracy or loss that dense ends with, on a lab network",
        """\
Seconds of training until a model is as good as dense at the end of its budget.

Trains on a lab network (see `gradsieve lab run --help`), once with each way of exchanging gradients, always
from the same weights and on the same batches. Dense runs first. What counts is the mean of the last three
evaluations; the others stop when it is not worse than dense's last one, or after twice as many steps.
Evaluation is not in the seconds. Needs root.

tasks:
  mlp           Fashion-MNIST, SGD with momentum; by test accuracy
  transformer   bytes of source text, AdamW; by the loss on unseen text, the lower the better

columns, means over seeds:
  late          steps after which a gradient knows what other ranks moved; 0 is in the same step
  seconds       of training, to the target; - if a seed never got there
  steps         the same in steps
  times_dense   dense's seconds over these
  spread        standard deviation of times_dense over seeds
  reached       seeds that reached the target
  step_ms       of one training step, over the whole run
  bytes_sent    by the busiest rank in a step, as its network interface counts them
  bits          the same for one parameter
  final         accuracy or loss where the run ended""",
        """\
gradsieve bench time-to-accuracy --rate 1gbit --plot accuracy.png
gradsieve bench time-to-accuracy --rate 100mbit --syncs fp16,auto,stripes:values=int4 --seeds 3
gradsieve bench time-to-accuracy --hosts 2,4 --syncs exdyna,exdyna@steps:every=2,exdyna-paper@paper
gradsieve bench time-to-accuracy --rate 100mbit --task transformer --params 1e6 --json loss.json""",
        "gradsieve_tools.commands.bench:time_to_accuracy",
        *LAB,
        option("--task", "what is trained", choices="gradsieve_tools.bench.tasks.sized:TASKS", default="mlp"),
        option("--params", "model size", "N", size, "6e6"),
        density(0.01),
        syncs("dense,fp16,powersgd,auto,exdyna,spardl,oktopk"),
        option("--steps", "dense's budget", "N", size, "600"),
        option("--seeds", "repetitions", "N", size, "1"),
        RECORD,
        output("--json", "write the rows, their curves and how they came about there"),
        picture("--plot", "draw accuracy or loss against seconds there"),
    ),
    "race": Command(
        "seconds until a GPT is as good as dense makes it, for any command that trains one",
        """\
Seconds of training until a GPT is as good as dense makes it within its budget, over slow links.

Rules: docs/race.md. Every entry is a command that is started on every host of a lab network (see
`gradsieve lab run --help`), with the same words after it, and prints a line of JSON an evaluation. Each run
leaves a log; one that is there is not run again. The table is made from the logs. Needs root to race.

entries:
  dense       plain DDP; sets the target, and always runs first
  fp16        DDP with torch's hook
  powersgd    DDP with torch's hook, of rank 2
  local-sgd   torch's post-local SGD
  diloco      torchft's own
  auto        gradsieve, as a user gets it who asks for nothing
  NAME=CMD    whatever else can be started by a command

columns, means over seeds:
  seconds     of training, to the target, where all seeds reached it
  spread      their standard deviation
  times_dense dense's seconds over these
  step_ms     of one training step, over the whole run""",
        """\
python examples/gpt/prepare.py text
gradsieve bench race --text text --logs benchmarks/race --plot race.png
gradsieve bench race --text text --logs mine --entries "auto,mine=python train_mine.py" --links 100mbit
gradsieve bench race --table --logs benchmarks/race""",
        "gradsieve_tools.commands.bench:race",
        option("--logs", "a log for each run", "FOLDER", Path, required=True),
        option("--text", "that examples/gpt/prepare.py has written", "FOLDER", Path),
        option("--entries", "who races", "LIST", default=",".join(rules.NAMES)),
        option("--links", "rate+delay", "LIST", default=",".join(rules.LINKS)),
        option("--seeds", "repetitions", "N", size, "3"),
        option("--size", "of examples/gpt", "NAME", default="1M"),
        option("--steps", "dense's budget", "N", size, "600"),
        option("--hosts", "in the lab", "N", size, "4"),
        option("--limit", "of training", "SECONDS", float, 900.0),
        flag("--table", "only make the table of the logs that are there"),
        picture("--plot", "draw loss against seconds there"),
    ),
    "traffic": Command(
        "words moved as the number of ranks grows, on virtual ranks",
        """\
How many words each scheme moves as the number of ranks grows.

Runs real steps of P virtual ranks in this one process, on skewed gradients cut into the tensors of a real
model, and counts the 4-byte words of the busiest rank in one step, next to the published formula. No network
is involved: these are bytes, not seconds. `gradsieve bench step` measures seconds.

columns:
  words                sent or received, whichever is more, of one collective after the other; of the busiest
                       rank in the worst step since the scheme converged
  formula_words        the published cost at the count and the imbalance seen in that step
  of_formula           words over formula_words
  times_k              words over k (P-1)/P, k being the elements to send
  mean_times_k         the same of the mean of the last 32 steps, a period of Ok-Topk with its exact step
  exact_words          the most in a step that evaluates thresholds again, left out of words (Ok-Topk)
  rounds               messages one after the other, by the best known algorithm for each collective
  formula_rounds       the published latency
  settled_after        steps until words stay within a tenth of the formula (Ok-Topk: between 2k and 6k);
                       - for never
  steps, ended         how many were run, and why no more. ExDyna with its balance and published rules with
                       partitions run until the means of imbalance and words over 100 steps are within 1 % in
                       three windows on end (settled) or for 1,500 steps, fewer where ranks times parameters
                       exceed 64 million (cap); words are those of the last 100. Others: 40 or 1 (fixed)
  density, imbalance   elements in the update over all; longest selection over the mean,
                       before any row is cut""",
        """\
gradsieve bench traffic --schemes topk,exdyna --world 2,16,128 --params 1e6 --plot traffic.png
gradsieve bench traffic --schemes deft,exdyna,exdyna-paper --world 16,256 --model transformer""",
        "gradsieve_tools.commands.bench:traffic",
        option("--schemes", "names with commas between them, or all; settings as in gtopk:paper=true",
            "LIST", schemes, "topk,micro,exdyna"),
        option("--world", "numbers of ranks", "LIST", worlds, "2,4,16,64,256,1024"),
        option("--model", "whose tensors the gradient is cut into",
            choices="gradsieve_tools.bench.traffic:MODELS", default="transformer"),
        option("--params", "about its size", "N", size, "1e6"),
        density(0.01),
        JSON,
        picture("--plot", "draw words against ranks there"),
    ),
    "schemes": Command(
        "words and quality of every scheme on recorded gradients, on virtual ranks",
        """\
All schemes side by side on gradients recorded from real training.

Trains small models in this one process, each virtual rank on its own part of the data, and shows the same
recorded gradients to every scheme. No network is involved: `gradsieve bench step` measures seconds.

columns, means over the second half of the steps:
  words       4-byte words that the busiest rank moves
  times_k     words over k (P-1)/P, k being the elements to send
  rounds      messages one after the other, by the best known algorithm for each collective
  of_target   elements in the update over k
  fidelity    energy that the update captures, over that of the best update with as many elements; 1 is best
  residual    norm of the residual over the norm of a gradient, both as means over ranks
  imbalance   most elements that one rank selects over the mean, before any row is cut
  select_ms   processor time that the busiest rank spends in the scheme's own code
  lost        largest part of a gradient's element that is neither applied nor in the residual; 0 but for
  rounding""",
        """\
gradsieve bench schemes --models cnn --world 4 --densities 0.01
gradsieve bench schemes --schemes exdyna,exdyna:blocks_per_partition=8,gtopk,gtopk:paper=true --plot a.png""",
        "gradsieve_tools.commands.bench:schemes",
        MODELS,
        option("--schemes", "names with commas between them; settings follow a colon, with + between them",
            "LIST", talking, "all"),
        option("--world", "numbers of ranks", "LIST", worlds, "4,16"),
        densities_of("0.01,0.001"),
        option("--steps", "recorded steps", "N", size, "12"),
        JSON,
        picture("--plot", "draw fidelity against words there"),
    ),
    "bits": Command(
        "what an exchange sends for its bits, next to the limit, on virtual ranks",
        """\
How much one exchange sends of the residual, for the bits it takes: every scheme and way to send values.

Trains tasks on virtual ranks in this one process, with exchange of steps by stripes as they are by default,
and keeps now and then each rank's residual just before an exchange. Every scheme is shown the same
vectors, and what an exchange sends is not taken away from them: these are figures of one exchange, not of a
training in which a scheme finds what it has left itself. Stripes are measured over whole rounds, others on
every snapshot, those that remember after they have seen all of them once.

columns:
  values    how values travel
  density   share of the elements that is asked for
  bits      moved by the busiest rank, for one parameter
  known      share of the energy of the mean over ranks that the update brings: 1 - |mean - update/P|^2 over
            |mean|^2; below 0 where it brings more noise than news
  bound     most that as many bits send of a Gaussian vector, 1 - 2^(-2R) with R bits an element, which are
            2R(P-1)/P up and down

The bound assumes that one rank knows the mean already and that all elements are Gaussian, alike and
independent. It is none for vectors with heavy tails: where little of the vector holds most of the energy, who
finds it sends more.""",
        """\
gradsieve bench bits --plot bits.png
gradsieve bench bits --tasks lstm --schemes stripes,exdyna,topk --values sign,int4 --densities 0.01,0.1,1""",
        "gradsieve_tools.commands.bench:bits",
        option("--tasks", "what is trained", "LIST", tasks, "cnn,transformer"),
        option("--schemes", "names with commas between them; settings follow a colon, with + between them",
            "LIST", lossy, "all"),
        option("--values", "ways to send values", "LIST", codecs, "all"),
        densities_of("0.001,0.003,0.01,0.03,0.1,0.3,1"),
        option("--world", "ranks", "N", worlds, "4"),
        option("--steps", "before the first snapshot", "N", size, "200"),
        option("--snapshots", "of the residual", "N", size, "4"),
        option("--every", "steps between two snapshots", "N", size, "7"),
        JSON,
        picture("--plot", "draw known against bits there"),
    ),
    "memory": Command(
        "memory that a sync adds to a rank, on real ranks",
        """\
How much memory each scheme needs besides parameters, gradients and the optimizer's state, with SGD and with
AdamW, on real ranks of this machine.

columns:
  before_mb, peak_mb   resident memory of the largest rank before the sync is made, and its peak in steps
  added_n              the difference, over the gradient's size: 3 would be three more gradients
  step_s               the sync's part of a step, on loopback""",
        """\
gradsieve bench memory --schemes stripes,exdyna --params 1e8""",
        "gradsieve_tools.commands.bench:memory",
        option("--schemes", "whose memory", "LIST", schemes, "stripes,exdyna"),
        option("--world", "ranks", "N", size, "2"),
        option("--params", "length of the gradient", "N", size, "3e7"),
        density(0.001),
        JSON,
    ),
    "lost": Command(
        "gradient that a scheme loses, to the last bit, on virtual ranks",
        """\
How much gradient a scheme loses over some steps of training: exactly 0, or it breaks the law.

Exchanges gradients recorded from real training among virtual ranks, in float64 and on a grid on which no sum
rounds, and looks for what is in no update and in no residual.

columns:
  lost        sum of the magnitudes that are missing, over that of all updates
  sent        the latter
  of_target   elements in an update over k""",
        """\
gradsieve bench lost --models cnn --schemes gtopk,gtopk:paper=true --world 8""",
        "gradsieve_tools.commands.bench:lost",
        MODELS,
        option("--schemes", "whose losses",
            "LIST", schemes, "spardl,spardl:residuals=end,spardl:residuals=local,gtopk,gtopk:paper=true"),
        option("--world", "ranks", "N", size, "8"),
        density(0.01),
        option("--steps", "recorded steps", "N", size, "12"),
        JSON,
    ),
    "accuracy": Command(
        "final accuracy of whole trainings, on virtual ranks",
        """\
Whether a model ends as good as it would with dense exchange.

Trains whole tasks for each sync, exchange settings, density and seed, on virtual ranks that go through the
same pipeline as real ones. Rivals have neither exchange settings nor density but settings of their own
(docs/rivals.md); torch's hooks among them, fp16 and powersgd, train in as many real processes. On the task
`documentation` nothing of gradsieve was chosen: it runs only by its name.
Hyper-parameters were tuned for dense and are the same for all, but for the multiples of the learning rate
that --rates asks for. Every training leaves a file in the folder and is not run again when it is there.

columns:
  final       the metric after the last step: test accuracy, or loss on unseen data; mean over seeds, and
              none where a training diverged
  spread      its standard deviation over seeds
  gap         how much worse than dense with the same seeds, at the task's own rate: points of accuracy, or
              per cent of the loss
  fidelity    energy that an update captures, over that of the best update with as many elements
  age         steps since an element was last sent, mean over those sent
  waiting     norm of the residual over that of what is sent
  apart       largest difference of an element between two ranks' own models, mean over looks
  bytes       sent or received by the busiest rank, whichever is more, a step, the flush at the end included
  bits        the same for one parameter
  unflushed   the metric of the model that all ranks share before the flush at the end; and the bits so far
  rate        times the task's learning rate
  trials      trainings in the folder, with the first seed, of the same sync with any settings and rate""",
        """\
gradsieve bench accuracy --tasks mlp --densities 0.01 --seeds 1 --folder runs
gradsieve bench accuracy --tasks cnn --treatments default,paper,steps:every=4 --folder runs
gradsieve bench accuracy --tasks transformer --syncs dense,local-sgd:every=8,diloco:every=32,sparseloco \\
    --rates 0.5,1,2 --own-rates --folder runs
gradsieve bench accuracy --tasks lstm --syncs dense,exdyna,powersgd:rank=4 --folder runs --plot lstm.png""",
        "gradsieve_tools.commands.bench:accuracy",
        option("--tasks", "to train (default: all but the held-out)", "LIST", tasks, "all"),
        option("--syncs", "schemes (all: every one), and rivals: fp16, powersgd:rank=N, local-sgd:every=H, "
            "diloco:every=H and others (docs/rivals.md; default: dense,exdyna, with --bits dense,stripes); "
            "exdyna@paper has exchange settings of its own", "LIST", schemes_and_rivals),
        option("--treatments", "exchange settings: default, paper (not the rules, which are schemes such as "
            "exdyna-paper), steps or gradients with settings (default: %(default)s)",
            "LIST", words, "default"),
        densities_of("0.01,0.001"),
        option("--bits", "budgets in bits a parameter and step, which stripes spend, instead of densities",
            "LIST", numbers, []),
        option("--rates", "multiples of the task's learning rate, each a training of its own",
            "LIST", numbers, "1"),
        flag("--own-rates", "each sync at the best of --rates, which the first seed tries; other seeds have "
            "that one only"),
        option("--world", "numbers of ranks", "LIST", worlds, "4"),
        option("--seeds", "trainings of each kind", "N", size, "3"),
        flag("--own-shards", "each rank has its own kinds of data (default: mixed)"),
        option("--steps", "shorter trainings (default: as long as the task is)", "N", size),
        option("--batch", "examples in a step, over all ranks (default: the task's)", "N", size),
        option("--jobs", "trainings at a time", "N", size, "1"),
        option("--folder", "where trainings are kept", "FOLDER", Path, required=True),
        RECORD,
        JSON,
        picture("--plot", "draw the curves there"),
    ),
    "resize": Command(
        "trainings that change their number of ranks, on virtual ranks",
        """\
Whether a training that changes its number of ranks ends as one that does not.

Trains a task on virtual ranks, with as many examples in a step throughout. At even distances the ranks stop
and as many as come next go on with what they had, by the rules of a checkpoint: the residual is kept, rank r
takes the optimizer of old rank r mod P.

columns:
  ranks       one after the other
  final       the metric after the last step and a flush: test accuracy, or loss on unseen data; mean over
              seeds
  spread      its standard deviation over seeds
  kept        largest relative change of the residual, over all ranks, at a change of their number""",
        """\
gradsieve bench resize --task lstm --bits 0.75 --ranks 4,4-2-4,4-6-3 --batch 24""",
        "gradsieve_tools.commands.bench:resize",
        option("--task", "what is trained", "NAME", default="transformer"),
        option("--scheme", "which", "NAME", default="stripes"),
        option("--bits", "a budget a parameter and step, which stripes spend", "B", float),
        option("--density", "share that is sent, where there is no budget", "D", float),
        option("--ranks", "numbers of ranks, one after the other with - between them",
            "LIST", ways, "4,4-2-4,4-6-3"),
        option("--seeds", "trainings of each kind", "N", size, "3"),
        option("--steps", "of a training", "N", size, "300"),
        option("--batch", "examples in a step, over all ranks", "N", size, "24"),
        JSON,
    ),
    "elastic": Command(
        "a training inside torchft whose replicas are killed and stopped",
        """\
Whether a training inside torchft that loses replicas ends as one that does not.

Trains a task twice on real processes, with a real torchft_lighthouse: undisturbed, and with one replica
killed (SIGKILL, and started again) or stopped (SIGSTOP, and continued later) every so many steps. The others
go on; who comes back takes the model of a peer. What was killed takes along its residual, whose norm, as of
its last exchange, is added up. What was stopped keeps it.

columns:
  final       the metric after the last step and a flush: loss on unseen data, or test accuracy
  back        replicas that were hit and have taken a step again
  failed      exchanges that did not count at once, of the replica with most; each was made again
  lost_mass   sum over the dead of the norms of their residuals
  gone_s      seconds from a fault until the others are two steps further, computing included; the median
  alike       whether all replicas ended with the same bits

The exit code is 1 if replicas differ at the end, or the loss is more than 2 % above the undisturbed one.""",
        """\
gradsieve bench elastic --replicas 4 --steps 300 --kill-every 30 --json elastic.json""",
        "gradsieve_tools.commands.bench:elastic",
        option("--task", "what is trained", "NAME", default="transformer"),
        option("--replicas", "processes", "N", size, "4"),
        option("--steps", "of a training", "N", size, "300"),
        option("--kill-every", "steps between two deaths", "N", size),
        option("--stop-every", "steps between two stops", "N", size),
        option("--stop-seconds", "how long", "SECONDS", float, 2.0),
        option("--bits", "a budget a parameter and step (default: 1)", "B", float),
        option("--scheme", "with a density: which", "NAME", default="exdyna"),
        option("--density", "share that is sent, where there is no budget", "D", float),
        option("--deadline", "of an exchange (default: %(default)s s)", "SECONDS", float, 5.0),
        option("--seed", "of weights and examples", "N", int, 0),
        JSON,
    ),
}
_LAB = {
    "run": Command(
        "run a command on every host",
        """\
Run a command on every host of a real multi-host network on this one Linux machine.

Each host is a network namespace with its own address on eth0; a switch joins them, and links have
the rate and delay you ask for. With --network there are several switches, and every link is as its
file says. The command finds RANK, WORLD_SIZE, MASTER_ADDR and the rest of what torchrun sets, one
process a host. All of it is removed at the end, also after Ctrl-C. Needs root.

The exit code is 0 if every rank's is 0, otherwise that of the rank that failed first (128 + the number
of the signal, if one killed it).""",
        """\
gradsieve lab run --hosts 4 --rate 1gbit -- python train.py
gradsieve lab run --hosts 2 --rate 100mbit --delay 5ms --timeout 600 -- python train.py --epochs 1
gradsieve lab run --network examples/networks/two-sites.toml -- python train.py""",
        "gradsieve_tools.commands.lab:run",
        option("--hosts", "how many hosts, 1 to 64 (default: 4)", "N", int),
        option("--rate", "of each link, e.g. 100mbit or 1gbit (default: unshaped)", "R"),
        option("--delay", "one way, e.g. 5ms or 250us (default: none)", "D"),
        option("--network", "hosts, switches and links in TOML, instead of these", "FILE", Path),
        option("--timeout", "end all ranks after this long", "SECONDS", float),
        option("--json", "write settings, exit codes and seconds there", "FILE", Path),
        option("command", "what each host runs", "CMD", nargs=argparse.REMAINDER),
    ),
    "draw": Command(
        "a picture of a network file",
        """\
Draw a network file: hosts, switches, and links with their rates and delays. The file is checked as
`gradsieve lab run --network` checks it; no root is needed.""",
        """\
gradsieve lab draw examples/networks/two-sites.toml -o two-sites.png""",
        "gradsieve_tools.commands.lab:draw",
        option("network", "hosts, switches and links in TOML", "FILE", Path),
        option("-o --out", "PNG or SVG (default: next to it, FILE.png)", "FILE.png", Path),
    ),
    "kill-matrix": Command(
        "let ranks die and stall at every op of a step, and check the survivors",
        """\
Each op of a scheme's step x {SIGKILL, SIGSTOP, SIGTERM, exit 0, exit 1, abort} x each of three ranks, on real
processes over gloo on the loopback. Every survivor must exit with a PeerError that names the rank, the step
and the op, within 6 s of a death and within the deadline and 1 s of a stall; must have kept the state it had
before the step, the same bits as in an undisturbed run; and must leave no thread and no connection behind.
After each fault the ranks restart from the last checkpoint.

One line of JSON a fault, the last line sums them up. The exit code is 0 if all went as it must.""",
        """\
gradsieve lab kill-matrix --schemes stripes,exdyna --json matrix.json""",
        "gradsieve_tools.commands.lab:kill_matrix",
        option("--schemes", "whose steps", "LIST", schemes, "stripes,exdyna,oktopk,spardl"),
        output("--json", "write the lines there"),
    ),
    "fuzz": Command(
        "altered messages at every place where a peer's bytes are read",
        """\
Hand altered messages in wherever a peer's bytes are read: each must be read as something lawful or refused.

Messages of every scheme and codec are made by real ranks, virtual ones, and altered with knowledge of what is
in them. They are read in processes that can have 3 MiB and twice the message more memory than before; one
that crashes, hangs for 20 s, wants more memory or raises anything but a refusal is a finding.

families:
  read by ...   what reads bytes, called by itself
  exchanges     a whole step of one rank, with one reply of it altered
  pipelines     a whole exchange of a pipeline, with what is piggybacked, and what is applied

The exit code is 0 without findings, otherwise 1; each finding is printed with the command that repeats it.
After Ctrl-C come the figures so far.""",
        """\
gradsieve lab fuzz --target frames --count 1e6 --seed 1
gradsieve lab fuzz --target frames --seed 1 --case 8231
gradsieve lab fuzz --target frames --count 1e6 --guided     (needs pip install 'gradsieve-tools[fuzz]')""",
        "gradsieve_tools.commands.lab:fuzz",
        option("--target", "what is read", "NAME", default="frames"),
        option("--count", "messages", "N", size, "100000"),
        option("--seed", "another one, other messages", "N", int, 0),
        option("--case", "only this message, with the traceback of what it does", "N", int),
        flag("--guided", "let atheris look for messages that reach new code"),
        output("--json", "write the figures there"),
    ),
    "chaos": Command(
        "train through a seeded schedule of faults of every kind, and check all ranks",
        """\
Three real ranks train with stripes, ExDyna, Ok-Topk and SparDL while a schedule of faults, made from the
seed, happens to them: deaths, also in the middle of a file; stops, damaged payloads, broken and slow links,
disks and processors, a store that goes and comes back, clocks that jump, notices of an end. After a fault
that ends the ranks all restart from the last checkpoint. Every rank's exit code, error, time and digests are
checked against an undisturbed run, every checkpoint that was acknowledged is read back, and what was lost
since is counted.

One line of JSON a fault, the last line sums them up. The exit code is 1 if anything hung, was lost silently
or went otherwise than it must. Links, disk and processor need root; without it their kinds are left out.""",
        """\
gradsieve lab chaos --faults 200 --seed 1 --json chaos.json""",
        "gradsieve_tools.commands.lab:chaos",
        option("--faults", "how many", "N", int, 200),
        option("--seed", "of the schedule", "N", int, 1),
        option("--kinds", "only the schedule's faults of these kinds, to repeat what was found", "LIST"),
        output("--json", "write the lines there"),
    ),
    "spot": Command(
        "train under torchrun on nodes that are killed, given notice and replaced",
        """\
Two nodes, each an agent of torchrun with a worker in real processes of this machine, train by a script that
is called and speaks as examples/restarts.py does. Their workers are killed, whole nodes are killed or given
notice (SIGTERM to the agent) and replaced. In the end the model has to be, bit for bit, that of an
undisturbed run. Every checkpoint is read back when it appears, and its hashes are compared.

With --workers and --nodes one fault follows another as soon as the training has saved again. With --hours
they come by chance, whatever the nodes are doing, in time that runs --speed times as fast: every hour a
notice, every second hour a worker and a node without one, in the mean.""",
        """\
gradsieve lab spot examples/restarts.py --workers 20 --nodes 6 --json spot-kills.json
gradsieve lab spot examples/restarts.py --hours 24 --speed 100 --json spot-day.json""",
        "gradsieve_tools.commands.lab:spot",
        option("script", "the training", type=Path),
        option("--workers", "workers to kill", "N", int, 0),
        option("--nodes", "nodes to kill and replace", "N", int, 0),
        option("--hours", "instead, by chance for so long", "H", float),
        option("--speed", "of these hours", "X", float, 100.0),
        option("--seed", "of the schedule", "N", int, 1),
        output("--json", "write the figures there"),
    ),
    "soak": Command(
        "train for thousands of steps and see whether memory, files or threads grow",
        """\
Two real ranks train a small model of several units over gloo on the loopback, behind
DistributedDataParallel, with a recorder: they evaluate, ask for metrics, flush and save now and then. Some
200 times each rank looks at itself: resident memory, objects of Python, open files, threads. The first
quarter of the steps is warm-up; from there on nothing may grow.

The exit code is 0 if all is flat, otherwise 1.""",
        """\
gradsieve lab soak --steps 20000 --json soak.json""",
        "gradsieve_tools.commands.lab:soak",
        option("--steps", "of each scheme", "N", size, "20000"),
        option("--schemes", "in order", "LIST", words, "stripes,exdyna"),
        output("--json", "write the figures there"),
    ),
}
COMMANDS = {
    "doctor": Command(
        "is this cluster set up well: interfaces, links, hosts; with the fix",
        """\
Examine the group that torchrun or a lab starts: run it where training would run, one process a rank.

It shows which interface gloo really uses on every rank, measures latency and bandwidth of every pair of ranks
(in rounds, each rank with one partner at a time) and the speed of every host, and looks at threads, versions,
kernels and time-outs. Each finding has a severity and the command that fixes it. Rank 0 prints.

It takes some seconds, 15 s at most for each pair that does not answer, and sends at most 200 MB a rank and
round, with at most 64 rounds.

With --self-test, not the cluster but this device: two ranks of its own compare kernels with the reference and
a training with the CPU's, look for leaks, and kill one of them. It takes a minute or two.

The exit code is 0 if all is well (there may be notes), 1 if there is an error or a warning or a check failed,
2 if it could not be found out.""",
        """\
torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --no-python gradsieve doctor
gradsieve lab run --network examples/networks/slow-link.toml -- gradsieve doctor --heat-map pairs.png
gradsieve lab run --hosts 4 --rate 1gbit -- gradsieve doctor --profile lab.toml --model train:build
gradsieve doctor --self-test --device cuda""",
        "gradsieve_tools.cli.doctor:run",
        option("--heat-map", "draw bandwidth and latency of all pairs, PNG or SVG", "FILE", Path),
        option("--profile", "write what was measured there: TOML, to predict from", "FILE", Path),
        option("--model", "a function that returns your model, or it and a function that takes it and "
            "returns a loss: counts parameters, times forward and backward, looks for hooks in the way",
            "MODULE:FACTORY"),
        option("--timeout", "that your training gives to init_process_group (default: torch's 1800)",
            "SECONDS", float),
        option("--json", "write facts, figures and findings there (of a self-test, by default to "
            "gradsieve-self-test.json)",
            "FILE", Path),
        flag("--self-test", "does gradsieve work on this device? Without torchrun"),
        option("--device",
            "of the self-test: cpu, cuda, ... (default: the accelerator that is there, or cpu)"),
    ),
    "plan": Command(
        "which way to exchange gradients, if any: predicted steps, ranked, with reasons",
        """\
Predict the time of a training step for dense (plain DDP), fp16, PowerSGD, every-H-steps and every scheme, and
recommend one, or plain DDP. From a profile that `gradsieve doctor --profile` measured, or from figures by
hand, which also replace those of a profile. Nothing is run.

columns:
  to_loss      speedup over plain DDP to DDP's final loss: the predicted step times the steps
               that were measured on a small transformer; - where they were not measured
  step_ms      predicted; gradsieve's exchange and DDP's hide behind backward
  of_link      what a step sends over what the link carries during a step without communication
  above        loss above dense's after as many steps, measured on such transformers; never predicted
  money_a_day  for what all ranks send in a day of training, with --price, in the place of the two before
  why_not      the reason against it
with --all also:
  vs_dense     times as fast as plain DDP
  bits         that the busiest rank moves, a parameter and step
  memory_mb    on a rank, besides model, gradients and AdamW
  gap          as `above`, and how well it is known

Differences below 10 % do not count; of such options the one with the smallest loss is recommended.""",
        """\
gradsieve plan --profile lab.toml --price 0.09 --json plan.json --plot plan.png
gradsieve plan --device l40s --world 4 --rate 1gbit --params 30.8e6 --compute 27ms
gradsieve plan --device cpu --world 16 --rate 1gbit --delay 5ms --params 25e6 --compute 300ms""",
        "gradsieve_tools.cli.plan:run",
        option("--profile", "what `gradsieve doctor --profile FILE` measured", "FILE", Path),
        option("--device", f"what ranks compute on, by its data sheet: {', '.join(DEVICES)} (by hand: cpu)",
            "NAME", choices=DEVICES),
        option("--world", "ranks", "N", world),
        option("--rate", "of a rank's link, e.g. 1gbit", "R", quantity(BITS, "1gbit")),
        option("--delay", "one way, e.g. 5ms (by hand: 0)", "D", quantity(SECONDS, "5ms")),
        option("--params", "parameters of the model, e.g. 25e6", "N", size),
        option("--compute", "forward and backward, e.g. 300ms", "T", quantity(SECONDS, "300ms")),
        option("--memory", "copied (by hand: the device's)", "B", quantity(BYTES_A_SECOND, "10GB/s")),
        option("--selection", "elements compared with a threshold (by hand: the device's)",
            "E", quantity(ELEMENTS_A_SECOND, "500M/s")),
        option("--density", "of schemes that select", "D", float, 0.01),
        option("--gap", "recommend nothing that ends further above dense's loss after as many steps "
            "(default: no limit, since the steps that are needed to reach it count)", "PERCENT", float),
        flag("--all", "all options and columns, however wide (default: six rows)"),
        option("--price", "of a GB sent, in any currency", "X", float),
        output("--json", "write the plan there"),
        picture("--plot", "draw steps against the rate of the links, PNG or SVG"),
    ),
    "watch": Command(
        "a running job, live, from its records",
        """\
Watch a running job, from the records it writes (`gradsieve.record`, or --record of a bench).

Only files are read: the job does not notice. The folder may still be empty, ranks may stop, last lines may be
half written. q or Ctrl-C ends it.

shown, of the last 50 steps, means over ranks:
  steps/s               of training
  loss                  if the training notes it
  bits a parameter      moved by a rank in a step
  density, threshold    share of the elements that is sent, and above which size
  imbalance f(t)        longest selection over the mean; 1 is balanced
  share of ranks cut    that could not send all they selected
  age, norm             of the residual; taken every 50 steps, unless the recorder was given another number
  exchange              ms a step by stage, and for how long the training waited
  slowest               the rank that the others wait for in collectives""",
        """\
gradsieve watch rec
gradsieve watch rec --once >> job.log""",
        "gradsieve_tools.cli.watch:run",
        option("folder", "where the job writes its records", "FOLDER", Path),
        flag("--once", "print one frame and end, for scripts"),
        option("--interval", "between two looks", "SECONDS", float, 1.0),
    ),
    "report": Command(
        "one HTML page of what was recorded",
        """\
Make one HTML page of recordings, that any browser opens without a network.

Takes what `gradsieve.record` and --record of the benches wrote: a folder, or files. Files of the same name
but for the rank are one training's; earlier files of a long one (.jsonl.1, ...) are found by themselves.
Lives of a training that was started again are joined. Lines that were not finished, of a job that runs or was
killed, are left out; a file that is no record is refused.

charts, over steps:
  bits a step      moved by a rank, a parameter
  link use         Mbit/s of a rank, over the whole step and while in collectives
  time by stage    ms a step, stacked; next to the whole training step
  age              steps for which what is sent now was in the residual
  imbalance f(t)   longest selection over the mean; 1 is balanced
  density          share of the elements that is sent, next to the target; and the threshold
  who waits        ms each rank spent in collectives beyond the rank that came last
and what to change, by rules, each with the figure it saw.""",
        """\
gradsieve report rec -o report.html
gradsieve report rec/exdyna.rank*.jsonl -o exdyna.html""",
        "gradsieve_tools.cli.report:run",
        option("places", "a folder of records, or files", "FOLDER", Path, nargs="+"),
        option("-o --out", "the page", "FILE.html", Path, Path("report.html")),
        option("--title", "of the page (default: the folder's name)", "TEXT"),
    ),
    "bench": Command("measure schemes against dense and against the limit", inner=_BENCH),
    "figure": Command(
        "draw the papers' figures",
        """\
Draw a figure of one of the papers from runs of your own.

Files are records (`gradsieve.record`, or --record of a bench) or the JSON of a bench, as the figure needs
them: `gradsieve figure --list` names paper, figure and the commands.""",
        """\
gradsieve figure exdyna-density rec/*.jsonl --out density.png""",
        "gradsieve_tools.commands.bench:figure",
        option("name", "of the figure", "NAME", nargs="?"),
        option("files", "records or results", "FILE", Path, nargs="*"),
        flag("--list", "all figures, and how their data are made"),
        picture("-o --out", "draw there"),
    ),
    "lab": Command("a real multi-host network on one Linux machine", inner=_LAB),
    "simulate": Command(
        "a step at up to thousands of ranks on a simulated network: star, fat tree, torus, two clouds",
        """\
What a step takes at many ranks on a network that is not there.

The schemes' own generators run at the number of ranks asked for and make the messages; SimGrid carries them
over the network (`apt install python3-simgrid`). To 1,024 ranks schedules are real; beyond, times are
extrapolated from at least three worlds, and marked. docs/simulate.md says what is modelled and what is not.

columns:
  exchange_seconds     simulated, all units one after the other
  step_seconds         compute + selection + exchange: nothing hidden; hidden_...: all that can be
  efficiency           step without communication / step; noop is that limit, dense the baseline, always there
  of_dense             step over dense's, nothing hidden
  rounds               messages one after the other
  megabytes_sent       by the busiest rank of each round
  busiest_link         share of its rate that is used during the exchange
  recorded_n, scaled   size of the vector on which generators ran; whether bytes were scaled from there""",
        """\
gradsieve simulate --schemes dense,topk,exdyna --world 1024 --topology fat-tree --params 1e9 --rate 25gbit
gradsieve simulate --world 64,256,1024,16384 --plot scaling.png --html scaling.html
gradsieve simulate --topology two-clouds --wan 1gbit --wan-delay 20ms --stragglers 1:2 --slow-links 2:10""",
        "gradsieve_tools.commands.simulate:run",
        option("--schemes", "names, settings after a colon; noop and dense are always there",
            "LIST", schemes, "topk,exdyna,stripes,spardl"),
        option("--world", "numbers of ranks", "LIST", worlds, "16,64,256"),
        option("--params", "of the model", "N", size, "25e6"),
        option("--density", "share that is sent, but by stripes (default: each scheme's own)", "D", float),
        option("--collectives", "as in training, dense by gloo's rings and the others in log2 P rounds "
            "where these are faster; or all of them by rings, or all in rounds",
            choices=["ours", "ring", "log"], default="ours"),
        option("--topology", "of the network",
            choices="gradsieve_tools.simulate.platforms:TOPOLOGIES", default="star"),
        option("--rate --link", "of every link", "R", default="10gbit"),
        option("--delay", "of every link, one way", "D", default="5us"),
        option("--wan", "between two clouds", "R", default="1gbit"),
        option("--wan-delay", "of it, one way", "D", default="20ms"),
        option("--message", "that a rank is busy with each message it sends", "T", default="30us"),
        option("--slow-links",
            "so many hosts, evenly spread, have links so many times slower (default: none)",
            "COUNT:FACTOR", some, "0:1"),
        option("--compute", "forward and backward of a rank, e.g. 250ms (default: 6 N operations for each "
            "of 4,096 tokens, at 100 Tflop/s)", "T"),
        option("--memory", "at which selection reads the gradient", "B", quantity(BYTES_A_SECOND, "20GB/s"),
            "20GB/s"),
        option("--stragglers", "so many ranks compute so many times longer (default: none)",
            "COUNT:FACTOR", some, "0:1"),
        output("--json", "write rows, loads of links and how they came about there"),
        picture("--plot", "draw curves and loads there"),
        output("--html", "write the same as one page there", "FILE.html", is_picture=True),
    ),
}
