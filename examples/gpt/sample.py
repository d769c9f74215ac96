"""Writes text with the newest checkpoint of a run.

python examples/gpt/sample.py --text text --out run "The kernel"
"""

import argparse
import json
from pathlib import Path

import torch
from model import GPT, SIZES
from tokenizers import Tokenizer


@torch.no_grad()
def continued(model, tokens, count, heat):
    """One token after the other, drawn by the model's own chances."""
    for _ in range(count):
        scores = model(tokens[:, -model.shape.context :])[:, -1] / heat
        tokens = torch.cat([tokens, torch.multinomial(scores.softmax(-1), 1)], dim=1)
    return tokens


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("begin", help="what the text begins with")
parser.add_argument("--text", type=Path, required=True, help="folder that prepare.py has written")
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--tokens", type=int, default=200)
parser.add_argument("--heat", type=float, default=0.8, help="less is more of the same")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
whole = sorted(path.parent for path in args.out.glob("step-*/manifest.json"))
if not whole:
    raise SystemExit(f"{args.out} has no checkpoint yet")
recipe = json.loads((whole[-1] / "facts.json").read_text())["recipe"]
model = GPT(SIZES[recipe["size"]], recipe["symbols"]).eval()
model.load_state_dict(torch.load(whole[-1] / "model.pt", weights_only=True))
tokenizer = Tokenizer.from_file(str(args.text / "tokenizer.json"))
torch.manual_seed(args.seed)
begin = torch.tensor([tokenizer.encode(args.begin).ids])
print(tokenizer.decode(continued(model, begin, args.tokens, args.heat)[0].tolist()))
