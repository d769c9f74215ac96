"""`gradsieve plan`: what every way to exchange would cost, before a machine is rented.

options.py   what can be had: torch's own ways and every scheme
predict.py   the time of a step, by the model of costs (`costs.py`) and what hides behind what
quality.py   what each was measured to lose
choose.py    the ranking, the recommendation, and why not the others
"""

from gradsieve_tools import profiles
from gradsieve_tools.plan.choose import MARGIN
from gradsieve_tools.plan.options import Model, named
from gradsieve_tools.plan.predict import costs_of, predict

__all__ = ["MARGIN", "Model", "costs_of", "named", "predict", "profiles"]
